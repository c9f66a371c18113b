// titan::float8_* on a GPU: LibTorch's tensors in, launches of float8_kernels.cu out.

#include <torch/library.h>

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda_plugin/float8_kernels.h"
#include "float8/composite.h"
#include "titan/float8/cast.h"

namespace titan::float8 {

namespace {

// Warps reduce in one instruction from compute capability 8.0 on.
bool has_kernels(const at::Tensor& x) {
  return at::cuda::getDeviceProperties(x.device().index())->major >= 8;
}

bool have_source(const at::Tensor& x) {
  return x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16;
}

// fp16 and others are widened first; the rest is the same.
at::Tensor as_source(const at::Tensor& x) { return (have_source(x) ? x : x.to(at::kFloat)).contiguous(); }

cuda::Matrix matrix_of(const at::Tensor& x) {
  return {.data = x.const_data_ptr(),
          .source = x.scalar_type() == at::kFloat ? cuda::Source::Float : cuda::Source::BFloat16,
          .rows = x.size(0),
          .columns = x.size(1)};
}

at::Tensor amax_cuda(const at::Tensor& x, std::optional<int64_t> dim) {
  if (!has_kernels(x)) return composite::amax(x, dim);
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor from = as_source(x);
  const auto options = x.options().dtype(at::kFloat);
  const bool of_rows = dim && *dim == 1;  // which a block has one of, and writes
  at::Tensor out = of_rows ? at::empty({x.size(0), 1}, options)
                   : dim   ? at::zeros({x.size(1), 1}, options)
                           : at::zeros({}, options);
  const auto launch = !dim      ? cuda::launch_amax
                      : of_rows ? cuda::launch_amax_of_rows
                                : cuda::launch_amax_of_columns;
  launch(out.mutable_data_ptr<float>(), matrix_of(from), c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

at::Tensor scale_cuda(const at::Tensor& amax, at::ScalarType dtype, bool power_of_two) {
  if (!has_kernels(amax)) return composite::scale_of(amax, dtype, power_of_two);
  const c10::cuda::CUDAGuard guard(amax.device());
  const at::Tensor from = amax.contiguous();
  at::Tensor out = at::empty(amax.sizes(), amax.options());
  if (out.numel() == 0) return out;
  cuda::launch_scale(out.mutable_data_ptr<float>(), from.const_data_ptr<float>(), out.numel(),
                     largest_value(dtype), power_of_two, c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

at::Tensor cast_cuda(const at::Tensor& x, const at::Tensor& scale, at::ScalarType dtype, bool transposed) {
  if (!has_kernels(x)) return composite::cast(x, scale, dtype, transposed);
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor from = as_source(x), scales = scale.contiguous();
  at::Tensor out = transposed ? at::empty({x.size(1), x.size(0)}, x.options().dtype(dtype))
                              : at::empty(x.sizes(), x.options().dtype(dtype));
  if (out.numel() == 0) return out;
  const cuda::CastOptions options{
      .scale = scales.const_data_ptr<float>(),
      .scale_by_row = scales.numel() > 1,
      .format = dtype == at::kFloat8_e4m3fn ? cuda::Format::E4m3 : cuda::Format::E5m2};
  const auto launch = transposed ? cuda::launch_transposed_cast : cuda::launch_cast;
  launch(static_cast<uint8_t*>(out.mutable_data_ptr()), matrix_of(from), options,
         c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

TORCH_LIBRARY_IMPL(titan, CUDA, m) {
  m.impl("float8_amax", amax_cuda);
  m.impl("float8_scale", scale_cuda);
  m.impl("float8_cast", cast_cuda);
}

}  // namespace
}  // namespace titan::float8

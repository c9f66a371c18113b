// titan::float8_* on a GPU: takes LibTorch's tensors and launches the kernels in float8_kernels.cu.

#include <algorithm>
#include <cstring>
#include <vector>

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "cuda_plugin/float8_kernels.h"
#include "float8/cast.h"

namespace titan::float8 {

namespace {

// The kernels need compute capability 8.0, where warps reduce in one instruction.
bool has_kernels(const at::Tensor& x) {
  return at::cuda::getDeviceProperties(x.device().index())->major >= 8;
}

bool is_source(const at::Tensor& x) {
  return x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16;
}

// Other dtypes, such as fp16, are converted to fp32 first.
at::Tensor as_source(const at::Tensor& x) { return (is_source(x) ? x : x.to(at::kFloat)).contiguous(); }

cuda::Source source_of(const at::Tensor& x) {
  return x.scalar_type() == at::kFloat ? cuda::Source::Float : cuda::Source::BFloat16;
}

cuda::Format format_of(at::ScalarType dtype) {
  return dtype == at::kFloat8_e4m3fn ? cuda::Format::E4m3 : cuda::Format::E5m2;
}

cuda::Matrix matrix_of(const at::Tensor& x) {
  return {.data = x.const_data_ptr(), .source = source_of(x), .rows = x.size(0), .columns = x.size(1)};
}

at::Tensor amax_cuda(const at::Tensor& x, std::optional<int64_t> dim) {
  if (!has_kernels(x)) return composite::amax(x, dim);
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor from = as_source(x);
  const auto options = x.options().dtype(at::kFloat);
  const bool of_rows = dim && *dim == 1;  // this kernel writes each element once, so out needs no zeros
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
                     {.largest = largest_value(dtype), .power_of_two = power_of_two},
                     c10::cuda::getCurrentCUDAStream());
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
  const cuda::CastOptions options{.scale = scales.const_data_ptr<float>(),
                                  .scale_by_row = scales.numel() > 1,
                                  .format = format_of(dtype)};
  const auto launch = transposed ? cuda::launch_transposed_cast : cuda::launch_cast;
  launch(static_cast<uint8_t*>(out.mutable_data_ptr()), matrix_of(from), options,
         c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

std::tuple<at::Tensor, at::Tensor> cast_blocks_cuda(const at::Tensor& x, at::ScalarType dtype, bool round_up,
                                                    bool transposed) {
  if (!has_kernels(x)) return composite::cast_blocks(x, dtype, round_up, transposed);
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor from = as_source(x);
  const int64_t vectors = x.size(transposed ? 1 : 0), elements = x.size(transposed ? 0 : 1);
  const int64_t blocks = (elements + kBlock - 1) / kBlock;
  at::Tensor data = at::empty({vectors, blocks * kBlock}, x.options().dtype(dtype));
  at::Tensor scale = at::empty({vectors, blocks}, x.options().dtype(at::kFloat8_e8m0fnu));
  const auto launch = transposed ? cuda::launch_cast_column_blocks : cuda::launch_cast_row_blocks;
  launch({static_cast<uint8_t*>(data.mutable_data_ptr()), static_cast<uint8_t*>(scale.mutable_data_ptr())},
         matrix_of(from), {.round_up = round_up, .format = format_of(dtype)},
         c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {data, scale};
}

constexpr int64_t kPieceElements = 65536;

std::vector<cuda::AmaxPiece> pieces_of(at::TensorList xs) {
  std::vector<cuda::AmaxPiece> pieces;
  for (size_t i = 0; i < xs.size(); ++i)
    for (int64_t first = 0; first < xs[i].numel(); first += kPieceElements)
      pieces.push_back({static_cast<const char*>(xs[i].const_data_ptr()) + first * xs[i].element_size(),
                        std::min(kPieceElements, xs[i].numel() - first), static_cast<int64_t>(i)});
  return pieces;
}

// Copies through pinned memory, which LibTorch's allocator doesn't reuse before the copy ends, so the host
// doesn't wait.
at::Tensor on_device(const std::vector<cuda::AmaxPiece>& pieces, at::Device device) {
  const auto bytes = static_cast<int64_t>(pieces.size() * sizeof(cuda::AmaxPiece));
  const at::Tensor host = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  std::memcpy(host.mutable_data_ptr(), pieces.data(), static_cast<size_t>(bytes));
  return host.to(device, /*non_blocking=*/true);
}

at::Tensor amax_many_cuda(at::TensorList xs) {
  for (const at::Tensor& x : xs)
    if (!has_kernels(x) || !is_source(x) || x.scalar_type() != xs[0].scalar_type() || !x.is_contiguous())
      return composite::amax_many(xs);
  const c10::cuda::CUDAGuard guard(xs[0].device());
  at::Tensor out = at::zeros({static_cast<int64_t>(xs.size())}, xs[0].options().dtype(at::kFloat));
  const std::vector<cuda::AmaxPiece> pieces = pieces_of(xs);
  const at::Tensor list = on_device(pieces, xs[0].device());
  cuda::launch_amax_of_pieces(
      out.mutable_data_ptr<float>(), static_cast<const cuda::AmaxPiece*>(list.const_data_ptr()),
      static_cast<int64_t>(pieces.size()), source_of(xs[0]), c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

at::Tensor delayed_scale_cuda(const at::Tensor& amax, const at::Tensor& pending, const at::Tensor& largest,
                              at::ScalarType dtype, bool power_of_two, bool records) {
  const c10::cuda::CUDAGuard guard(amax.device());
  at::Tensor out = at::empty({}, amax.options());
  cuda::launch_delayed_scale(out.mutable_data_ptr<float>(),
                             {.amax = amax.const_data_ptr<float>(),
                              .pending = pending.mutable_data_ptr<float>(),
                              .largest_of_history = largest.const_data_ptr<float>(),
                              .records = records},
                             {.largest = largest_value(dtype), .power_of_two = power_of_two},
                             c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

TORCH_LIBRARY_IMPL(titan, CUDA, m) {
  m.impl("float8_amax", amax_cuda);
  m.impl("float8_scale", scale_cuda);
  m.impl("float8_cast", cast_cuda);
  m.impl("float8_cast_blocks", cast_blocks_cuda);
  m.impl("float8_amax_many", amax_many_cuda);
  m.impl("float8_delayed_scale", delayed_scale_cuda);
}

}  // namespace
}  // namespace titan::float8

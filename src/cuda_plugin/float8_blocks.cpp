// Casting blocks, many largest magnitudes and delayed scales on a GPU: LibTorch's tensors in, launches of
// float8_block_kernels.cu out.

#include <algorithm>
#include <cstring>
#include <vector>

#include <torch/library.h>

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda_plugin/float8_block_kernels.h"
#include "float8/amax_many.h"
#include "float8/block_composite.h"
#include "titan/float8/block_cast.h"
#include "titan/float8/cast.h"

namespace titan::float8 {

namespace {

// Warps reduce in one instruction from compute capability 8.0 on.
bool runs_kernels(const at::Tensor& x) {
  return at::cuda::getDeviceProperties(x.device().index())->major >= 8;
}

cuda::Source source_of(const at::Tensor& x) {
  return x.scalar_type() == at::kFloat ? cuda::Source::Float : cuda::Source::BFloat16;
}
bool is_source(const at::Tensor& x) {
  return x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16;
}

std::tuple<at::Tensor, at::Tensor> cast_blocks_cuda(const at::Tensor& x, at::ScalarType dtype, bool round_up,
                                                    bool transposed) {
  if (!runs_kernels(x)) return composite::cast_blocks(x, dtype, round_up, transposed);
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor from = (is_source(x) ? x : x.to(at::kFloat)).contiguous();
  const int64_t vectors = x.size(transposed ? 1 : 0), elements = x.size(transposed ? 0 : 1);
  const int64_t blocks = (elements + kBlock - 1) / kBlock;
  at::Tensor data = at::empty({vectors, blocks * kBlock}, x.options().dtype(dtype));
  at::Tensor scale = at::empty({vectors, blocks}, x.options().dtype(at::kFloat8_e8m0fnu));
  const cuda::Matrix matrix{from.const_data_ptr(), source_of(from), from.size(0), from.size(1)};
  const cuda::BlockOptions options{
      .round_up = round_up, .format = dtype == at::kFloat8_e4m3fn ? cuda::Format::E4m3 : cuda::Format::E5m2};
  const auto launch = transposed ? cuda::launch_cast_column_blocks : cuda::launch_cast_row_blocks;
  launch(static_cast<uint8_t*>(data.mutable_data_ptr()), static_cast<uint8_t*>(scale.mutable_data_ptr()),
         matrix, options, c10::cuda::getCurrentCUDAStream());
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

// Through pinned memory, which LibTorch's allocator doesn't give out again before the copy is done: the host
// doesn't wait.
at::Tensor on_device(const std::vector<cuda::AmaxPiece>& pieces, at::Device device) {
  const auto bytes = static_cast<int64_t>(pieces.size() * sizeof(cuda::AmaxPiece));
  const at::Tensor host = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  std::memcpy(host.mutable_data_ptr(), pieces.data(), static_cast<size_t>(bytes));
  return host.to(device, /*non_blocking=*/true);
}

at::Tensor amax_many_cuda(at::TensorList xs) {
  for (const at::Tensor& x : xs)
    if (!runs_kernels(x) || !is_source(x) || x.scalar_type() != xs[0].scalar_type() || !x.is_contiguous())
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
  cuda::launch_delayed_scale(
      out.mutable_data_ptr<float>(), amax.const_data_ptr<float>(), pending.mutable_data_ptr<float>(),
      largest.const_data_ptr<float>(),
      {.largest = largest_value(dtype), .power_of_two = power_of_two, .records = records},
      c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

TORCH_LIBRARY_IMPL(titan, CUDA, m) {
  m.impl("float8_cast_blocks", cast_blocks_cuda);
  m.impl("float8_amax_many", amax_many_cuda);
  m.impl("float8_delayed_scale", delayed_scale_cuda);
}

}  // namespace
}  // namespace titan::float8

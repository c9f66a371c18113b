// titan::float8_* on a GPU: takes LibTorch's tensors and launches the kernels in float8_kernels.cu.

#include <algorithm>
#include <cstring>
#include <vector>

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
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

float* floats(at::Tensor& x) { return x.mutable_data_ptr<float>(); }
uint8_t* bytes_or_null(at::Tensor& x) {
  return x.defined() ? static_cast<uint8_t*>(x.mutable_data_ptr()) : nullptr;
}

cuda::ScaleOptions scale_options(at::ScalarType dtype, bool power_of_two) {
  return cuda::scale_options(largest_value(dtype), power_of_two);
}

at::Tensor magnitudes_cuda(const at::Tensor& x, bool of_columns) {
  if (!has_kernels(x)) return composite::magnitudes(x, of_columns);
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor from = as_source(x);
  const cuda::Matrix matrix = matrix_of(from);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  at::Tensor out = of_columns ? at::empty({cuda::parts_of_columns(matrix), x.size(1)}, from.options())
                              : at::empty({cuda::parts_of_matrix(matrix)}, x.options().dtype(at::kFloat));
  if (of_columns) {
    cuda::launch_magnitudes_of_columns(out.mutable_data_ptr(), matrix, stream);
  } else {
    cuda::launch_magnitudes(floats(out), matrix, stream);
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

at::Tensor amax_cuda(const at::Tensor& x, std::optional<int64_t> dim) {
  if (!has_kernels(x)) return composite::amax(x, dim);
  if (!dim) return magnitudes_cuda(x, /*of_columns=*/false).amax();
  if (*dim == 0) return magnitudes_cuda(x, /*of_columns=*/true).amax({0}).to(at::kFloat).unsqueeze(1);
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor from = as_source(x);
  at::Tensor out = at::empty({x.size(0), 1}, x.options().dtype(at::kFloat));
  cuda::launch_amax_of_rows(floats(out), matrix_of(from), c10::cuda::getCurrentCUDAStream());
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
                     scale_options(dtype, power_of_two), c10::cuda::getCurrentCUDAStream());
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
  const auto* factors = scales.const_data_ptr<float>();
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const bool by_vector = scales.numel() > 1;
  if (by_vector && transposed) {
    cuda::launch_cast_columns({.columns = bytes_or_null(out)}, matrix_of(from), format_of(dtype),
                              {.scale = factors}, stream);
  } else if (by_vector) {
    cuda::launch_cast_by_rows(bytes_or_null(out), matrix_of(from), format_of(dtype), factors, stream);
  } else if (transposed) {
    cuda::launch_cast_tiles({.columns = bytes_or_null(out)}, matrix_of(from), format_of(dtype),
                            {.scale = factors}, stream);
  } else {
    cuda::launch_cast(bytes_or_null(out), matrix_of(from), format_of(dtype), {.scale = factors}, stream);
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

void cast_into_cuda(const at::Tensor& out, const at::Tensor& x, const at::Tensor& scale) {
  if (!has_kernels(x)) return composite::cast_into(out, x, scale);
  if (out.numel() == 0) return;
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor from = as_source(x);
  cuda::launch_cast(static_cast<uint8_t*>(out.mutable_data_ptr()), matrix_of(from),
                    format_of(out.scalar_type()), {.scale = scale.const_data_ptr<float>()},
                    c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

composite::FourTensors cast_both_cuda(const at::Tensor& x, const std::optional<at::Tensor>& magnitudes,
                                      const std::optional<at::Tensor>& scale, at::ScalarType dtype,
                                      bool power_of_two, bool rows, bool columns) {
  if (!has_kernels(x)) return composite::cast_both(x, magnitudes, scale, dtype, power_of_two, rows, columns);
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor from = as_source(x);
  const auto bytes = x.options().dtype(dtype), one_float = x.options().dtype(at::kFloat);
  at::Tensor along_rows, down_columns, made, inverse = at::empty({}, one_float);
  if (rows || !columns) along_rows = at::empty(x.sizes(), bytes);
  if (columns) down_columns = at::empty({x.size(1), x.size(0)}, bytes);
  cuda::MatrixScale source{.inverse_out = floats(inverse)};
  if (scale) {
    source.scale = scale->const_data_ptr<float>();
  } else {
    made = at::empty({}, one_float);
    source.magnitudes = magnitudes->const_data_ptr<float>();
    source.count = magnitudes->numel();
    source.options = scale_options(dtype, power_of_two);
    source.scale_out = floats(made);
  }
  const auto stream = c10::cuda::getCurrentCUDAStream();
  if (columns) {
    cuda::launch_cast_tiles({bytes_or_null(along_rows), bytes_or_null(down_columns)}, matrix_of(from),
                            format_of(dtype), source, stream);
  } else {
    cuda::launch_cast(bytes_or_null(along_rows), matrix_of(from), format_of(dtype), source, stream);
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {along_rows, down_columns, made, inverse};
}

bool fits_into_registers(const at::Tensor& x) {
  return x.size(1) % 16 == 0 && x.size(1) <= cuda::kMaxRowOfRegisters &&
         reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
}

composite::FourTensors cast_rows_cuda(const at::Tensor& x, at::ScalarType dtype, bool power_of_two,
                                      bool measures_columns) {
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor from = as_source(x);
  if (!has_kernels(x) || !fits_into_registers(from))
    return composite::cast_rows(x, dtype, power_of_two, measures_columns);
  const cuda::Matrix matrix = matrix_of(from);
  const auto one_per_row = x.options().dtype(at::kFloat);
  at::Tensor data = at::empty(x.sizes(), x.options().dtype(dtype));
  at::Tensor scale = at::empty({x.size(0), 1}, one_per_row), inverse = at::empty({x.size(0), 1}, one_per_row);
  at::Tensor of_columns;
  if (measures_columns)
    of_columns = at::empty({cuda::parts_of_measured_rows(matrix), x.size(1)}, from.options());
  cuda::launch_measured_rows({.data = bytes_or_null(data),
                              .scale = floats(scale),
                              .inverse = floats(inverse),
                              .magnitudes = bytes_or_null(of_columns)},
                             matrix, format_of(dtype), scale_options(dtype, power_of_two),
                             c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {data, scale, inverse, of_columns};
}

// `magnitudes` have the dtype of the matrix as the kernels read it.
std::tuple<at::Tensor, at::Tensor, at::Tensor> cast_columns_cuda(const at::Tensor& x,
                                                                 const at::Tensor& magnitudes,
                                                                 at::ScalarType dtype, bool power_of_two) {
  if (!has_kernels(x)) return composite::cast_columns(x, magnitudes, dtype, power_of_two);
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor from = as_source(x), parts = magnitudes.to(from.scalar_type()).contiguous();
  const auto one_per_column = x.options().dtype(at::kFloat);
  at::Tensor data = at::empty({x.size(1), x.size(0)}, x.options().dtype(dtype));
  at::Tensor scale = at::empty({x.size(1), 1}, one_per_column),
             inverse = at::empty({x.size(1), 1}, one_per_column);
  cuda::launch_cast_columns({.columns = bytes_or_null(data)}, matrix_of(from), format_of(dtype),
                            {.magnitudes = parts.const_data_ptr(),
                             .count = parts.size(0),
                             .options = scale_options(dtype, power_of_two),
                             .scale_out = floats(scale),
                             .inverse_out = floats(inverse)},
                            c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {data, scale, inverse};
}

// cuBLASLt multiplies vectors with scales of their own on GPUs of compute capability 9.x, from CUDA 12.9 on. On others LibTorch has a
// kernel that returns only 16 bits and is slow without fast accumulation.
bool has_vector_product(const at::Tensor& x) {
  return CUDART_VERSION >= 12090 && at::cuda::getDeviceProperties(x.device().index())->major == 9;
}

at::Tensor per_vector(const at::Tensor& inverse, const at::Tensor& data) {
  return inverse.numel() > 1 ? inverse : inverse.expand({data.size(0), 1}).contiguous();
}

void multiply_vectors_cuda(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                           const at::Tensor& inverse_a, const at::Tensor& inverse_b, bool fast_accumulation,
                           bool power_of_two_scales) {
  const bool narrow = out.scalar_type() == at::kBFloat16;
  if (!has_kernels(a) || !is_source(out))
    return composite::multiply_vectors(out, a, b, inverse_a, inverse_b, fast_accumulation,
                                       power_of_two_scales);
  at::Tensor result = out;
  if (has_vector_product(a) || (fast_accumulation && narrow)) {
    at::_scaled_mm_out(result, a, b.t(), per_vector(inverse_a, a), per_vector(inverse_b, b).t(), /*bias=*/{},
                       /*scale_result=*/{}, out.scalar_type(), fast_accumulation);
    return;
  }
  // See the composition.
  const c10::cuda::CUDAGuard guard(out.device());
  const bool in_place = !narrow || power_of_two_scales;
  at::Tensor sums = in_place ? out : at::empty(out.sizes(), out.options().dtype(at::kFloat));
  const at::Tensor one = at::ones({}, inverse_a.options());
  at::_scaled_mm_out(sums, a, b.t(), one, one, /*bias=*/{}, /*scale_result=*/{}, sums.scalar_type(),
                     fast_accumulation);
  cuda::launch_scale_sums(result.mutable_data_ptr(), source_of(out), matrix_of(sums),
                          {.of_rows = inverse_a.const_data_ptr<float>(),
                           .of_columns = inverse_b.const_data_ptr<float>(),
                           .rows = inverse_a.numel(),
                           .columns = inverse_b.numel()},
                          c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
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
                             {.magnitudes = amax.const_data_ptr<float>(),
                              .count = amax.numel(),
                              .pending = pending.mutable_data_ptr<float>(),
                              .largest_of_history = largest.const_data_ptr<float>(),
                              .records = records},
                             scale_options(dtype, power_of_two), c10::cuda::getCurrentCUDAStream());
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
  m.impl("float8_magnitudes", magnitudes_cuda);
  m.impl("float8_cast_into", cast_into_cuda);
  m.impl("float8_cast_both", cast_both_cuda);
  m.impl("float8_cast_rows", cast_rows_cuda);
  m.impl("float8_cast_columns", cast_columns_cuda);
  m.impl("float8_multiply_vectors", multiply_vectors_cuda);
}

}  // namespace
}  // namespace titan::float8

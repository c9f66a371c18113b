// titan::float8_* on a GPU: takes LibTorch's tensors and launches the kernels in float8_*.cu.

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
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
  const cuda::Measurement measurement{matrix, out.mutable_data_ptr()};
  if (of_columns) {
    cuda::launch_magnitudes_of_columns({&measurement, 1}, stream);
  } else {
    cuda::launch_magnitudes({&measurement, 1}, stream);
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

std::tuple<at::Tensor, at::Tensor> scale_cuda(const at::Tensor& amax, at::ScalarType dtype,
                                              bool power_of_two) {
  if (!has_kernels(amax)) return composite::scale_and_inverse_of(amax, dtype, power_of_two);
  const c10::cuda::CUDAGuard guard(amax.device());
  const at::Tensor from = amax.contiguous();
  at::Tensor out = at::empty(amax.sizes(), amax.options()), inverse = at::empty(amax.sizes(), amax.options());
  if (out.numel() == 0) return {out, inverse};
  cuda::launch_scale(floats(out), floats(inverse), from.const_data_ptr<float>(), out.numel(),
                     scale_options(dtype, power_of_two), c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {out, inverse};
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
  const cuda::CastTiles tiles{.rows = transposed ? nullptr : bytes_or_null(out),
                              .columns = transposed ? bytes_or_null(out) : nullptr};
  if (by_vector && transposed) {
    const cuda::CastOf<cuda::ColumnScales> work{matrix_of(from), tiles, {.scale = factors}};
    cuda::launch_cast_columns({&work, 1}, format_of(dtype), stream);
  } else if (by_vector) {
    const cuda::CastRows work{matrix_of(from), tiles.rows, factors};
    cuda::launch_cast_by_rows({&work, 1}, format_of(dtype), stream);
  } else {
    const cuda::CastOf<cuda::MatrixScale> work{matrix_of(from), tiles, {.scale = factors}};
    cuda::launch_cast({&work, 1}, format_of(dtype), stream);
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

// Whether one launch can take all of them.
bool have_kernels_together(at::TensorList xs) {
  return std::all_of(xs.begin(), xs.end(), [&](const at::Tensor& x) {
    return has_kernels(x) && x.scalar_type() == xs[0].scalar_type();
  });
}

std::vector<at::Tensor> as_sources(at::TensorList xs) {
  std::vector<at::Tensor> from;
  for (const at::Tensor& x : xs) from.push_back(as_source(x));
  return from;
}

void cast_into_many_cuda(at::TensorList outs, at::TensorList xs, const at::Tensor& scales) {
  if (xs.empty()) return;
  if (!have_kernels_together(xs)) return composite::cast_into_many(outs, xs, scales);
  const c10::cuda::CUDAGuard guard(xs[0].device());
  const std::vector<at::Tensor> from = as_sources(xs);
  const at::Tensor contiguous_scales = scales.contiguous();
  std::vector<cuda::CastOf<cuda::MatrixScale>> works;
  for (size_t i = 0; i < xs.size(); ++i)
    if (xs[i].numel() > 0)
      works.push_back({matrix_of(from[i]),
                       {.rows = static_cast<uint8_t*>(outs[i].mutable_data_ptr())},
                       {.scale = contiguous_scales.const_data_ptr<float>() + i}});
  cuda::launch_cast(works, format_of(outs[0].scalar_type()), c10::cuda::getCurrentCUDAStream());
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
  const cuda::CastOf<cuda::MatrixScale> work{
      matrix_of(from), {bytes_or_null(along_rows), bytes_or_null(down_columns)}, source};
  cuda::launch_cast({&work, 1}, format_of(dtype), c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {along_rows, down_columns, made, inverse};
}

composite::FourTensors cast_delayed_cuda(const at::Tensor& x, const at::Tensor& pending,
                                         const at::Tensor& largest, at::ScalarType dtype, bool power_of_two,
                                         bool records, bool rows, bool columns) {
  if (!has_kernels(x))
    return composite::cast_delayed(x, pending, largest, dtype, power_of_two, records, rows, columns);
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor from = as_source(x);
  const cuda::Matrix matrix = matrix_of(from);
  const auto bytes = x.options().dtype(dtype), one_float = x.options().dtype(at::kFloat);
  at::Tensor along_rows, down_columns, scale = at::empty({}, one_float), inverse = at::empty({}, one_float);
  if (rows || !columns) along_rows = at::empty(x.sizes(), bytes);
  if (columns) down_columns = at::empty({x.size(1), x.size(0)}, bytes);
  const cuda::CastTiles out{bytes_or_null(along_rows), bytes_or_null(down_columns)};
  at::Tensor magnitudes = at::empty({cuda::parts_of_cast(out, matrix)}, one_float);
  cuda::launch_cast_delayed(
      {matrix,
       out,
       {.magnitudes = floats(magnitudes),
        .count = magnitudes.numel(),
        .options = scale_options(dtype, power_of_two),
        .history = {largest.const_data_ptr<float>(), records ? pending.mutable_data_ptr<float>() : nullptr},
        .scale_out = floats(scale),
        .inverse_out = floats(inverse)}},
      format_of(dtype), c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {along_rows, down_columns, scale, inverse};
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
  const cuda::MeasuredRows work{matrix, bytes_or_null(data), floats(scale), floats(inverse),
                                bytes_or_null(of_columns)};
  cuda::launch_measured_rows({&work, 1}, format_of(dtype), scale_options(dtype, power_of_two),
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
  const cuda::CastOf<cuda::ColumnScales> work{matrix_of(from),
                                              {.columns = bytes_or_null(data)},
                                              {.magnitudes = parts.const_data_ptr(),
                                               .count = parts.size(0),
                                               .options = scale_options(dtype, power_of_two),
                                               .scale_out = floats(scale),
                                               .inverse_out = floats(inverse)}};
  cuda::launch_cast_columns({&work, 1}, format_of(dtype), c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {data, scale, inverse};
}

// Results of cast_many, and the kernels' work for each.
class ManyCastsOnGpu {
 public:
  ManyCastsOnGpu(std::vector<at::Tensor> from, at::TensorList xs, at::TensorList scales, at::ScalarType dtype,
                 bool power_of_two)
      : from_(std::move(from)),
        scales_(scales.begin(), scales.end()),
        dtype_(dtype),
        options_(scale_options(dtype, power_of_two)),
        stream_(c10::cuda::getCurrentCUDAStream()) {
    for (at::Tensor& scale : scales_) scale = scale.contiguous();
    data_options_ = xs[0].options().dtype(dtype);
  }

  composite::ThreeLists with_one_scale(bool transposed) {
    if (scales_.empty()) measure(/*of_columns=*/false);
    std::vector<cuda::CastOf<cuda::MatrixScale>> works;
    for (size_t i = 0; i < from_.size(); ++i) {
      cuda::MatrixScale scale{.options = options_};
      if (scales_.empty()) {
        scale.magnitudes = measured_[i].const_data_ptr<float>();
        scale.count = measured_[i].numel();
        std::tie(scale.scale_out, scale.inverse_out) = make_scales({});
      } else {
        scale.scale = scales_[i].const_data_ptr<float>();
      }
      works.push_back({matrix_of(from_[i]), make_data(i, transposed), scale});
    }
    cuda::launch_cast(works, format_of(dtype_), stream_);
    return results_;
  }
  composite::ThreeLists columns_with_their_scales() {
    if (scales_.empty()) measure(/*of_columns=*/true);
    std::vector<cuda::CastOf<cuda::ColumnScales>> works;
    for (size_t i = 0; i < from_.size(); ++i) {
      cuda::ColumnScales scale{.options = options_};
      if (scales_.empty()) {
        scale.magnitudes = measured_[i].const_data_ptr();
        scale.count = measured_[i].size(0);
        std::tie(scale.scale_out, scale.inverse_out) = make_scales({from_[i].size(1), 1});
      } else {
        scale.scale = scales_[i].const_data_ptr<float>();
      }
      works.push_back({matrix_of(from_[i]), make_data(i, /*transposed=*/true), scale});
    }
    cuda::launch_cast_columns(works, format_of(dtype_), stream_);
    return results_;
  }
  composite::ThreeLists rows_with_their_scales() {
    if (!scales_.empty()) {
      std::vector<cuda::CastRows> works;
      for (size_t i = 0; i < from_.size(); ++i)
        works.push_back({matrix_of(from_[i]), make_data(i, false).rows, scales_[i].const_data_ptr<float>()});
      cuda::launch_cast_by_rows(works, format_of(dtype_), stream_);
      return results_;
    }
    std::vector<cuda::MeasuredRows> works;
    for (size_t i = 0; i < from_.size(); ++i) {
      const auto [scale, inverse] = make_scales({from_[i].size(0), 1});
      works.push_back({matrix_of(from_[i]), make_data(i, false).rows, scale, inverse});
    }
    cuda::launch_measured_rows(works, format_of(dtype_), options_, stream_);
    return results_;
  }

 private:
  void measure(bool of_columns) {
    std::vector<cuda::Measurement> works;
    for (const at::Tensor& x : from_) {
      const cuda::Matrix matrix = matrix_of(x);
      measured_.push_back(of_columns
                              ? at::empty({cuda::parts_of_columns(matrix), x.size(1)}, x.options())
                              : at::empty({cuda::parts_of_matrix(matrix)}, x.options().dtype(at::kFloat)));
      works.push_back({matrix, measured_.back().mutable_data_ptr()});
    }
    if (of_columns) {
      cuda::launch_magnitudes_of_columns(works, stream_);
    } else {
      cuda::launch_magnitudes(works, stream_);
    }
  }
  cuda::CastTiles make_data(size_t i, bool transposed) {
    const int64_t rows = from_[i].size(0), columns = from_[i].size(1);
    auto& data = std::get<0>(results_);
    data.push_back(at::empty({transposed ? columns : rows, transposed ? rows : columns}, data_options_));
    return {.rows = transposed ? nullptr : bytes_or_null(data.back()),
            .columns = transposed ? bytes_or_null(data.back()) : nullptr};
  }
  std::pair<float*, float*> make_scales(at::IntArrayRef sizes) {
    auto& [data, scales, inverses] = results_;
    for (auto* list : {&scales, &inverses})
      list->push_back(at::empty(sizes, data_options_.dtype(at::kFloat)));
    return {floats(scales.back()), floats(inverses.back())};
  }

  std::vector<at::Tensor> from_, scales_, measured_;
  at::ScalarType dtype_;
  cuda::ScaleOptions options_;
  cudaStream_t stream_;
  at::TensorOptions data_options_;
  composite::ThreeLists results_;
};

composite::ThreeLists cast_many_cuda(at::TensorList xs, at::TensorList scales, at::ScalarType dtype,
                                     bool power_of_two, bool by_vector, bool transposed) {
  const c10::cuda::CUDAGuard guard(xs[0].device());
  std::vector<at::Tensor> from;
  const bool measures_rows = by_vector && !transposed && scales.empty();
  bool together = have_kernels_together(xs);
  if (together) from = as_sources(xs);
  together = together && (!measures_rows || std::all_of(from.begin(), from.end(), fits_into_registers));
  if (!together) return composite::cast_many(xs, scales, dtype, power_of_two, by_vector, transposed);
  ManyCastsOnGpu casts(std::move(from), xs, scales, dtype, power_of_two);
  auto results = !by_vector   ? casts.with_one_scale(transposed)
                 : transposed ? casts.columns_with_their_scales()
                              : casts.rows_with_their_scales();
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return results;
}

std::vector<at::Tensor> transpose_many_cuda(at::TensorList xs) {
  if (xs.empty()) return {};
  if (!has_kernels(xs[0])) return composite::transpose_many(xs);
  const c10::cuda::CUDAGuard guard(xs[0].device());
  std::vector<at::Tensor> from, results;
  std::vector<cuda::Transpose> works;
  for (const at::Tensor& x : xs) {
    from.push_back(x.contiguous());
    results.push_back(at::empty({x.size(1), x.size(0)}, x.options()));
    if (x.numel() > 0)
      works.push_back({{.data = from.back().const_data_ptr(), .rows = x.size(0), .columns = x.size(1)},
                       bytes_or_null(results.back())});
  }
  cuda::launch_transpose(works, c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return results;
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
  const at::Tensor one = at::for_blob(const_cast<float*>(cuda::one_on_device()), {})
                             .options(inverse_a.options())
                             .target_device(out.device())
                             .make_tensor();
  C10_CUDA_KERNEL_LAUNCH_CHECK();
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

void put_product_cuda(const at::Tensor& out, const at::Tensor& mat1, const at::Tensor& mat2,
                      const at::Tensor& scale_1, const at::Tensor& scale_2, bool fast_accumulation,
                      bool power_of_two_scales, bool adds) {
  using Factors = cuda::Product::Factors;
  const at::Tensor b = mat2.t();
  const Factors factors = scale_1.scalar_type() == at::kFloat8_e8m0fnu ? Factors::OfBlocks
                          : scale_1.numel() > 1 || scale_2.numel() > 1 ? Factors::OfVectors
                                                                       : Factors::OfMatrices;
  const bool by_vector = factors == Factors::OfVectors;
  const bool is_possible = is_source(out) && out.is_contiguous() && mat1.is_contiguous() &&
                           b.is_contiguous() && (!by_vector || has_vector_product(out));
  const at::Tensor factors_1 = by_vector ? per_vector(scale_1, mat1) : scale_1,
                   factors_2 = by_vector ? per_vector(scale_2, b) : scale_2;
  const c10::cuda::CUDAGuard guard(out.device());
  if (is_possible && cuda::put_product({.out = out.mutable_data_ptr(),
                                        .source = source_of(out),
                                        .a = mat1.const_data_ptr(),
                                        .b = b.const_data_ptr(),
                                        .format_a = format_of(mat1.scalar_type()),
                                        .format_b = format_of(b.scalar_type()),
                                        .factors_a = factors_1.const_data_ptr(),
                                        .factors_b = factors_2.const_data_ptr(),
                                        .factors = factors,
                                        .rows = out.size(0),
                                        .columns = out.size(1),
                                        .length = mat1.size(1),
                                        .fast_accumulation = fast_accumulation,
                                        .adds = adds},
                                       c10::cuda::getCurrentCUDAStream()))
    return;
  composite::put_product(out, mat1, mat2, scale_1, scale_2, fast_accumulation, power_of_two_scales, adds);
}

struct NewBlocks {
  NewBlocks(const at::Tensor& x, at::ScalarType dtype, bool transposed, bool for_hardware)
      : is_for_hardware(for_hardware) {
    const int64_t vectors = x.size(transposed ? 1 : 0), elements = x.size(transposed ? 0 : 1);
    const int64_t blocks = (elements + kBlock - 1) / kBlock;
    data = at::empty({vectors, blocks * kBlock}, x.options().dtype(dtype));
    const int64_t size = size_of_blocked_layout(vectors, blocks);
    const auto bytes = x.options().dtype(at::kByte);
    exponents = !for_hardware             ? at::empty({vectors, blocks}, bytes)
                : size > vectors * blocks ? at::zeros({size}, bytes)
                                          : at::empty({size}, bytes);
  }
  cuda::CastBlocks places() { return {bytes_or_null(data), bytes_or_null(exponents), is_for_hardware}; }
  at::Tensor scale() const { return exponents.view(at::kFloat8_e8m0fnu); }

  at::Tensor data, exponents;
  bool is_for_hardware;
};

std::tuple<at::Tensor, at::Tensor> cast_blocks_cuda(const at::Tensor& x, at::ScalarType dtype, bool round_up,
                                                    bool transposed, bool for_hardware) {
  if (!has_kernels(x)) return composite::cast_blocks(x, dtype, round_up, transposed, for_hardware);
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor from = as_source(x);
  NewBlocks blocks(x, dtype, transposed, for_hardware);
  const auto launch = transposed ? cuda::launch_cast_column_blocks : cuda::launch_cast_row_blocks;
  launch(blocks.places(), matrix_of(from), {.round_up = round_up, .format = format_of(dtype)},
         c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {blocks.data, blocks.scale()};
}

composite::FourTensors cast_blocks_both_cuda(const at::Tensor& x, at::ScalarType dtype, bool round_up,
                                             bool for_hardware) {
  if (!has_kernels(x)) return composite::cast_blocks_both(x, dtype, round_up, for_hardware);
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor from = as_source(x);
  NewBlocks rows(x, dtype, /*transposed=*/false, for_hardware),
      columns(x, dtype, /*transposed=*/true, for_hardware);
  cuda::launch_cast_both_blocks(rows.places(), columns.places(), matrix_of(from),
                                {.round_up = round_up, .format = format_of(dtype)},
                                c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {rows.data, rows.scale(), columns.data, columns.scale()};
}

at::Tensor amax_many_cuda(at::TensorList xs) {
  for (const at::Tensor& x : xs)
    if (!has_kernels(x) || !is_source(x) || x.scalar_type() != xs[0].scalar_type() || !x.is_contiguous())
      return composite::amax_many(xs);
  const c10::cuda::CUDAGuard guard(xs[0].device());
  at::Tensor out = at::zeros({static_cast<int64_t>(xs.size())}, xs[0].options().dtype(at::kFloat));
  std::vector<cuda::Measurement> all;
  for (size_t i = 0; i < xs.size(); ++i)
    all.push_back(
        {{xs[i].const_data_ptr(), source_of(xs[i]), 1, xs[i].numel()}, out.mutable_data_ptr<float>() + i});
  cuda::launch_amax_of_many(all, c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

at::Tensor delayed_scale_cuda(const at::Tensor& amax, const at::Tensor& pending, const at::Tensor& largest,
                              at::ScalarType dtype, bool power_of_two, bool records) {
  if (!has_kernels(amax))
    return composite::delayed_scale(amax, pending, largest, dtype, power_of_two, records);
  const c10::cuda::CUDAGuard guard(amax.device());
  at::Tensor out = at::empty({}, amax.options());
  cuda::launch_delayed_scale(
      {.magnitudes = amax.const_data_ptr<float>(),
       .count = amax.numel(),
       .options = scale_options(dtype, power_of_two),
       .history = {largest.const_data_ptr<float>(), records ? pending.mutable_data_ptr<float>() : nullptr},
       .scale_out = floats(out)},
      c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

void update_histories_cuda(const at::Tensor& history, const at::Tensor& pending, const at::Tensor& largest) {
  if (!has_kernels(history) || history.size(0) == 0)
    return composite::update_histories(history, pending, largest);
  const c10::cuda::CUDAGuard guard(history.device());
  cuda::launch_update_histories({.history = history.mutable_data_ptr<float>(),
                                 .pending = pending.mutable_data_ptr<float>(),
                                 .largest = largest.mutable_data_ptr<float>(),
                                 .rows = history.size(0),
                                 .steps = history.size(1)},
                                c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

TORCH_LIBRARY_IMPL(titan, CUDA, m) {
  m.impl("float8_amax", amax_cuda);
  m.impl("float8_scale", scale_cuda);
  m.impl("float8_cast", cast_cuda);
  m.impl("float8_put_product", put_product_cuda);
  m.impl("float8_cast_blocks", cast_blocks_cuda);
  m.impl("float8_cast_blocks_both", cast_blocks_both_cuda);
  m.impl("float8_amax_many", amax_many_cuda);
  m.impl("float8_delayed_scale", delayed_scale_cuda);
  m.impl("float8_magnitudes", magnitudes_cuda);
  m.impl("float8_cast_into_many", cast_into_many_cuda);
  m.impl("float8_cast_both", cast_both_cuda);
  m.impl("float8_cast_delayed", cast_delayed_cuda);
  m.impl("float8_cast_many", cast_many_cuda);
  m.impl("float8_transpose_many", transpose_many_cuda);
  m.impl("float8_update_histories", update_histories_cuda);
  m.impl("float8_cast_rows", cast_rows_cuda);
  m.impl("float8_cast_columns", cast_columns_cuda);
  m.impl("float8_multiply_vectors", multiply_vectors_cuda);
}

}  // namespace
}  // namespace titan::float8

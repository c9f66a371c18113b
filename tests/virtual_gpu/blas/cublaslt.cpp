// cublasLtMatmul for scaled products of Float8 matrices: LibTorch's _scaled_mm checks its arguments and calls this.
// https://docs.nvidia.com/cuda/cublas, "cublasLtMatmul" and "Narrow precision data types usage".

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "runtime/virtual_gpu.h"

namespace virtual_gpu {
namespace {

// The opaque structures hold a pointer to these.
struct Product {
  std::map<int, std::vector<char>> attributes;

  template <class T>
  T get(cublasLtMatmulDescAttributes_t attribute, T fallback) const {
    const auto found = attributes.find(attribute);
    if (found == attributes.end()) return fallback;
    T value{};
    std::memcpy(&value, found->second.data(), std::min(sizeof value, found->second.size()));
    return value;
  }
};
size_t bytes_of(cudaDataType type);

struct Layout {
  cudaDataType type = CUDA_R_32F;
  int64_t rows = 0, columns = 0, leading = 0;
  /// To the end of the last column.
  size_t bytes() const { return static_cast<size_t>((columns - 1) * leading + rows) * bytes_of(type); }
};

template <class T, class Opaque>
T*& pointer_in(Opaque* opaque) {
  return *reinterpret_cast<T**>(opaque->data);
}

bool is_float8(cudaDataType type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }

size_t bytes_of(cudaDataType type) { return is_float8(type) ? 1 : type == CUDA_R_32F ? 4 : 2; }

float load(const void* data, cudaDataType type, int64_t i) {
  switch (type) {
    case CUDA_R_8F_E4M3:
      return static_cast<float>(static_cast<const __nv_fp8_e4m3*>(data)[i]);
    case CUDA_R_8F_E5M2:
      return static_cast<float>(static_cast<const __nv_fp8_e5m2*>(data)[i]);
    case CUDA_R_16BF:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
    case CUDA_R_16F:
      return __half2float(static_cast<const __half*>(data)[i]);
    case CUDA_R_32F:
      return static_cast<const float*>(data)[i];
    default:
      not_supported("data type " + std::to_string(type) + " in cublasLtMatmul",
                    "Add it to blas/cublaslt.cpp.");
  }
}
void store(void* data, cudaDataType type, int64_t i, float value) {
  switch (type) {
    case CUDA_R_16BF:
      static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16(value);
      return;
    case CUDA_R_16F:
      static_cast<__half*>(data)[i] = __float2half(value);
      return;
    case CUDA_R_32F:
      static_cast<float*>(data)[i] = value;
      return;
    default:
      not_supported("a result of type " + std::to_string(type), "Add it to blas/cublaslt.cpp.");
  }
}

// One factor of the product: element (outer, inner) is row `outer` of op(A), or column `outer` of op(B).
struct Factor {
  const void* data = nullptr;
  Layout layout;
  bool inner_is_contiguous = false;
  const void* scale = nullptr;
  int scale_mode = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;

  int64_t num_inner() const { return inner_is_contiguous ? layout.rows : layout.columns; }
  int64_t num_outer() const { return inner_is_contiguous ? layout.columns : layout.rows; }

  // Scales of blocks of 32 are in tiles of 128 rows by 4 blocks, in the order that tensor cores read.
  int64_t num_tiles() const { return (num_inner() / 32 + 3) / 4; }
  Range scales() const {
    switch (scale_mode) {
      case CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0:  // tiles may have padding
        return {.data = scale, .bytes = static_cast<size_t>((num_outer() + 127) / 128 * num_tiles() * 512)};
      case CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F:
        return {.data = scale,
                .bytes = static_cast<size_t>(num_outer()) * sizeof(float),
                .is_computed_with = true};
      default:
        return {.data = scale, .bytes = sizeof(float), .is_computed_with = true};
    }
  }
  float block_scale(int64_t outer, int64_t inner) const {
    const int64_t block = inner / 32, tiles = num_tiles();
    const int64_t tile = outer / 128 * tiles + block / 4;
    const int64_t place = tile * 512 + outer % 32 * 16 + outer % 128 / 32 * 4 + block % 4;
    const int exponent = static_cast<const uint8_t*>(scale)[place];
    return exponent == 255 ? NAN : std::ldexp(1.0f, exponent - 127);
  }
  float at(int64_t outer, int64_t inner) const {
    const int64_t i = inner_is_contiguous ? outer * layout.leading + inner : inner * layout.leading + outer;
    const float value = load(data, layout.type, i);
    return scale_mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0 ? value * block_scale(outer, inner) : value;
  }
  // All elements: [outer][inner].
  std::vector<float> elements() const {
    std::vector<float> all;
    all.reserve(static_cast<size_t>(num_outer() * num_inner()));
    for (int64_t outer = 0; outer < num_outer(); ++outer)
      for (int64_t inner = 0; inner < num_inner(); ++inner) all.push_back(at(outer, inner));
    return all;
  }
  // The factor that applies to sums of `outer`.
  float outer_scale(int64_t outer) const {
    if (!scale || scale_mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0) return 1;
    return static_cast<const float*>(
        scale)[scale_mode == CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F ? outer : 0];
  }
};

Factor factor_of(const Product& product, const void* data, const Layout& layout, bool is_a) {
  const auto transposed =
      product.get<int>(is_a ? CUBLASLT_MATMUL_DESC_TRANSA : CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
  Factor factor{data, layout};
  factor.inner_is_contiguous = (transposed != CUBLAS_OP_N) == is_a;
  factor.scale = product.get<const void*>(
      is_a ? CUBLASLT_MATMUL_DESC_A_SCALE_POINTER : CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, nullptr);
  factor.scale_mode =
      product.get<int>(is_a ? CUBLASLT_MATMUL_DESC_A_SCALE_MODE : CUBLASLT_MATMUL_DESC_B_SCALE_MODE,
                       CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F);
  return factor;
}

// Sixteen sums at a time, which the compiler turns into vectors.
float dot(const float* x, const float* y, int64_t size) {
  constexpr int width = 16;
  float sums[width] = {};
  int64_t k = 0;
  for (; k + width <= size; k += width)
    for (int lane = 0; lane < width; ++lane) sums[lane] += x[k + lane] * y[k + lane];
  for (; k < size; ++k) sums[0] += x[k] * y[k];
  return std::accumulate(sums, sums + width, 0.0f);
}

// Limits of the hardware: Float8 needs the inner dimension contiguous in both factors before compute capability 10.0,
// sizes that are multiples of 16, and matrices and scales of rows that begin at multiples of 16 bytes. Scales of rows are for 9.0 only, those of blocks of 32 for
// 10.0 and later.
bool is_possible(const Factor& a, const Factor& b) {
  if (!is_float8(a.layout.type) || !is_float8(b.layout.type)) return true;
  if (compute_capability() < 89) return false;
  if (compute_capability() < 100 && !(a.inner_is_contiguous && b.inner_is_contiguous)) return false;
  if (a.layout.type == CUDA_R_8F_E5M2 && b.layout.type == CUDA_R_8F_E5M2) return false;
  const auto begins_well = [](const Factor& f) {
    const bool of_rows = f.scale_mode == CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    return reinterpret_cast<uintptr_t>(f.data) % 16 == 0 &&
           (!of_rows || reinterpret_cast<uintptr_t>(f.scale) % 16 == 0);
  };
  const auto has_its_scales = [](const Factor& f) {
    if (f.scale_mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0) return compute_capability() >= 100;
    if (f.scale_mode == CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F) return compute_capability() == 90;
    return f.scale_mode == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
  };
  for (const Factor& f : {a, b})
    if (!begins_well(f) || !has_its_scales(f)) return false;
  return a.num_inner() % 16 == 0 && a.layout.leading % 16 == 0 && b.layout.leading % 16 == 0;
}

}  // namespace
}  // namespace virtual_gpu

using namespace virtual_gpu;

extern "C" {

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* description, cublasComputeType_t,
                                        cudaDataType_t) {
  *description = new cublasLtMatmulDescOpaque_t{};
  pointer_in<Product>(*description) = new Product;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description) {
  delete pointer_in<Product>(description);
  delete description;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t description,
                                              cublasLtMatmulDescAttributes_t attribute, const void* value,
                                              size_t bytes) {
  const auto* begin = static_cast<const char*>(value);
  pointer_in<Product>(description)->attributes[attribute].assign(begin, begin + bytes);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t leading) {
  *layout = new cublasLtMatrixLayoutOpaque_t{};
  pointer_in<Layout>(*layout) =
      new Layout{type, static_cast<int64_t>(rows), static_cast<int64_t>(columns), leading};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete pointer_in<Layout>(layout);
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void*,
                                                size_t) {
  not_supported("attribute " + std::to_string(attribute) + " of a cublasLt matrix layout",
                "Products aren't batched here.");
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = new cublasLtMatmulPreferenceOpaque_t{};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                    cublasLtMatmulPreferenceAttributes_t, const void*,
                                                    size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t description,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t, int,
                                              cublasLtMatmulHeuristicResult_t* results, int* num_results) {
  const Product& product = *pointer_in<Product>(description);
  *num_results = 0;
  if (!is_possible(factor_of(product, nullptr, *pointer_in<Layout>(a), true),
                   factor_of(product, nullptr, *pointer_in<Layout>(b), false)))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  results[0] = {};
  results[0].state = CUBLAS_STATUS_SUCCESS;
  *num_results = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t description, const void* alpha,
                              const void* a_data, cublasLtMatrixLayout_t a_layout, const void* b_data,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c_data,
                              cublasLtMatrixLayout_t c_layout, void* d_data, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t stream) {
  const Product& product = *pointer_in<Product>(description);
  const Factor a = factor_of(product, a_data, *pointer_in<Layout>(a_layout), true);
  const Factor b = factor_of(product, b_data, *pointer_in<Layout>(b_layout), false);
  const Layout d = *pointer_in<Layout>(d_layout);
  if (!is_possible(a, b) || reinterpret_cast<uintptr_t>(d_data) % 16 != 0) return CUBLAS_STATUS_NOT_SUPPORTED;
  const float factor = *static_cast<const float*>(alpha);
  const float factor_of_c = *static_cast<const float*>(beta);
  const Layout c = *pointer_in<Layout>(c_layout);
  if (factor_of_c != 0 && (c_data != d_data || c.type != d.type || c.leading != d.leading))
    not_supported("cublasLtMatmul that adds to another matrix than its result",
                  "Add it to blas/cublaslt.cpp.");
  const void* bias = product.get<const void*>(CUBLASLT_MATMUL_DESC_BIAS_POINTER, nullptr);
  const auto bias_type =
      static_cast<cudaDataType>(product.get<int>(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, d.type));
  // A matrix with gaps between its columns isn't looked at.
  const auto read = [](const Factor& f) {
    return Range{
        .data = f.data, .bytes = f.layout.bytes(), .is_computed_with = f.layout.leading == f.layout.rows};
  };
  const size_t d_bytes = d.bytes();
  std::vector<Range> ranges{read(a), read(b)};
  if (factor_of_c != 0)
    ranges.push_back({.data = d_data,
                      .bytes = d_bytes,
                      .is_written = true,
                      .is_read_too = true,
                      .is_computed_with = d.leading == d.rows});
  else
    ranges.push_back({d_data, d_bytes, true});
  for (const Factor* f : {&a, &b})
    if (f->scale) ranges.push_back(f->scales());
  if (bias)
    ranges.push_back(
        {.data = bias, .bytes = static_cast<size_t>(d.rows) * bytes_of(bias_type), .is_computed_with = true});
  const cudaError_t error = submit(stream, computation("cublasLtMatmul", std::move(ranges), [=] {
                                     if (!computes() && d_bytes > small_bytes) return;
                                     const std::vector<float> a_elements = a.elements(),
                                                              b_elements = b.elements();
                                     const int64_t size = a.num_inner();
                                     for (int64_t i = 0; i < d.rows; ++i) {
                                       for (int64_t j = 0; j < d.columns; ++j) {
                                         float sum = dot(&a_elements[i * size], &b_elements[j * size], size);
                                         sum *= factor * a.outer_scale(i) * b.outer_scale(j);
                                         if (bias) sum += load(bias, bias_type, i);
                                         const int64_t place = j * d.leading + i;
                                         if (factor_of_c != 0)
                                           sum += factor_of_c * load(d_data, d.type, place);
                                         store(d_data, d.type, place, sum);
                                       }
                                     }
                                   }));
  return error ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"

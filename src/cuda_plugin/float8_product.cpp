// Products of Float8 matrices that are added to a sum, which LibTorch's _scaled_mm doesn't do: its product would be a tensor of its own, in fp32 as
// large as a weight's gradient, and the addition reads both.

#include <cublasLt.h>

#include <algorithm>

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/Exceptions.h>

#include "cuda_plugin/float8_kernels.h"

namespace titan::float8::cuda {

namespace {

cudaDataType type_of(Format format) { return format == Format::E4m3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2; }

class Description {
 public:
  Description() {
    TORCH_CUDABLAS_CHECK(cublasLtMatmulDescCreate(&description_, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  }
  ~Description() { cublasLtMatmulDescDestroy(description_); }
  Description(const Description&) = delete;
  Description& operator=(const Description&) = delete;

  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    TORCH_CUDABLAS_CHECK(cublasLtMatmulDescSetAttribute(description_, attribute, &value, sizeof value));
  }
  cublasLtMatmulDesc_t get() const { return description_; }

 private:
  cublasLtMatmulDesc_t description_ = nullptr;
};

// As cuBLAS has it: its columns are our rows.
class MatrixLayout {
 public:
  MatrixLayout(cudaDataType type, int64_t rows, int64_t columns) {
    TORCH_CUDABLAS_CHECK(cublasLtMatrixLayoutCreate(&layout_, type, static_cast<uint64_t>(columns),
                                                    static_cast<uint64_t>(rows), columns));
  }
  ~MatrixLayout() { cublasLtMatrixLayoutDestroy(layout_); }
  MatrixLayout(const MatrixLayout&) = delete;
  MatrixLayout& operator=(const MatrixLayout&) = delete;

  cublasLtMatrixLayout_t get() const { return layout_; }

 private:
  cublasLtMatrixLayout_t layout_ = nullptr;
};

class Preference {
 public:
  Preference() { TORCH_CUDABLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference_)); }
  ~Preference() { cublasLtMatmulPreferenceDestroy(preference_); }
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;

  template <class T>
  void set(cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
    TORCH_CUDABLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference_, attribute, &value, sizeof value));
  }
  cublasLtMatmulPreference_t get() const { return preference_; }

 private:
  cublasLtMatmulPreference_t preference_ = nullptr;
};

// Up to 256, which cuBLAS supposes of all matrices; a gradient's place in a buffer may have less.
uint32_t alignment_of(const void* address) {
  const auto bits = reinterpret_cast<uintptr_t>(address);
  return static_cast<uint32_t>(std::min<uintptr_t>(bits & (~bits + 1), 256));
}

}  // namespace

// Float8 has one form of product: both matrices have the summed dimension contiguous, so in cuBLAS's order the first one is transposed.
bool add_product(const AddedProduct& product, cudaStream_t stream) {
  Description description;
  description.set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  description.set(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
  description.set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, product.factor_b);
  description.set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, product.factor_a);
  description.set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(product.fast_accumulation));
  const MatrixLayout a(type_of(product.format_a), product.rows, product.length),
      b(type_of(product.format_b), product.columns, product.length),
      out(product.source == Source::Float ? CUDA_R_32F : CUDA_R_16BF, product.rows, product.columns);
  const cublasLtHandle_t handle = at::cuda::getCurrentCUDABlasLtHandle();
  const size_t workspace_bytes = at::cuda::getCUDABlasLtWorkspaceSize();
  void* workspace = at::cuda::getCUDABlasLtWorkspace();
  Preference preference;
  preference.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(product.b));
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(product.a));
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(product.out));
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(product.out));
  cublasLtMatmulHeuristicResult_t found = {};
  int num_found = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle, description.get(), b.get(), a.get(), out.get(), out.get(),
                                     preference.get(), 1, &found, &num_found);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return false;
  TORCH_CUDABLAS_CHECK(status);
  if (num_found == 0) return false;
  const float one = 1;
  TORCH_CUDABLAS_CHECK(cublasLtMatmul(handle, description.get(), &one, product.b, b.get(), product.a, a.get(),
                                      &one, product.out, out.get(), product.out, out.get(), &found.algo,
                                      workspace, workspace_bytes, stream));
  return true;
}

}  // namespace titan::float8::cuda

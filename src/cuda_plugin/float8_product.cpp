// Products of Float8 matrices that are added to a sum, which LibTorch's _scaled_mm doesn't do: its product would be a tensor of its own, in fp32 as
// large as a weight's gradient, and the addition reads both. Products with scales of blocks are put into their place by the same call.

#include <cublasLt.h>

#include <algorithm>
#include <memory>

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/Exceptions.h>

#include "cuda_plugin/float8_kernels.h"

namespace titan::float8::cuda {

namespace {

cudaDataType type_of(Format format) { return format == Format::E4m3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2; }

cublasLtMatmulMatrixScale_t mode_of(Product::Factors factors) {
  switch (factors) {
    case Product::Factors::OfVectors:
      return CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    case Product::Factors::OfBlocks:
      return CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
    default:
      return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
  }
}

template <auto kDestroy>
struct Destroy {
  void operator()(auto* handle) const { kDestroy(handle); }
};
template <auto kCreate, auto kDestroy, class Opaque>
class Handle {
 public:
  template <class... Arguments>
  explicit Handle(Arguments... arguments) {
    Opaque* made = nullptr;
    TORCH_CUDABLAS_CHECK(kCreate(&made, arguments...));
    handle_.reset(made);
  }
  Opaque* get() const { return handle_.get(); }

 private:
  std::unique_ptr<Opaque, Destroy<kDestroy>> handle_;
};
using Description = Handle<cublasLtMatmulDescCreate, cublasLtMatmulDescDestroy, cublasLtMatmulDescOpaque_t>;
using MatrixLayout =
    Handle<cublasLtMatrixLayoutCreate, cublasLtMatrixLayoutDestroy, cublasLtMatrixLayoutOpaque_t>;
using Preference =
    Handle<cublasLtMatmulPreferenceCreate, cublasLtMatmulPreferenceDestroy, cublasLtMatmulPreferenceOpaque_t>;

void set(const Description& description, cublasLtMatmulDescAttributes_t attribute, const auto& value) {
  TORCH_CUDABLAS_CHECK(cublasLtMatmulDescSetAttribute(description.get(), attribute, &value, sizeof value));
}
void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
  TORCH_CUDABLAS_CHECK(
      cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof value));
}

// As cuBLAS has it: its columns are our rows.
MatrixLayout layout_of(cudaDataType type, int64_t rows, int64_t columns) {
  return MatrixLayout(type, static_cast<uint64_t>(columns), static_cast<uint64_t>(rows), columns);
}

// Up to 256, which cuBLAS supposes of all matrices; a gradient's place in a buffer may have less.
uint32_t alignment_of(const void* address) {
  const auto bits = reinterpret_cast<uintptr_t>(address);
  return static_cast<uint32_t>(std::min<uintptr_t>(bits & (~bits + 1), 256));
}

}  // namespace

// Float8 has one form of product: both matrices have the summed dimension contiguous, so in cuBLAS's order the first one is transposed.
bool put_product(const Product& product, cudaStream_t stream) {
  const Description description(CUBLAS_COMPUTE_32F, CUDA_R_32F);
  set(description, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  set(description, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
  set(description, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, product.factors_b);
  set(description, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, product.factors_a);
  for (const auto mode : {CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_DESC_B_SCALE_MODE})
    set(description, mode, mode_of(product.factors));
  set(description, CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(product.fast_accumulation));
  const MatrixLayout a = layout_of(type_of(product.format_a), product.rows, product.length),
                     b = layout_of(type_of(product.format_b), product.columns, product.length),
                     out = layout_of(product.source == Source::Float ? CUDA_R_32F : CUDA_R_16BF, product.rows,
                                     product.columns);
  const cublasLtHandle_t handle = at::cuda::getCurrentCUDABlasLtHandle();
  const size_t workspace_bytes = at::cuda::getCUDABlasLtWorkspaceSize();
  void* workspace = at::cuda::getCUDABlasLtWorkspace();
  const Preference preference;
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(product.b));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(product.a));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(product.out));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(product.out));
  cublasLtMatmulHeuristicResult_t found = {};
  int num_found = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle, description.get(), b.get(), a.get(), out.get(), out.get(),
                                     preference.get(), 1, &found, &num_found);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return false;
  TORCH_CUDABLAS_CHECK(status);
  if (num_found == 0 || found.state != CUBLAS_STATUS_SUCCESS) return false;
  const float one = 1, of_out = product.adds ? 1 : 0;
  TORCH_CUDABLAS_CHECK(cublasLtMatmul(handle, description.get(), &one, product.b, b.get(), product.a, a.get(),
                                      &of_out, product.out, out.get(), product.out, out.get(), &found.algo,
                                      workspace, workspace_bytes, stream));
  return true;
}

}  // namespace titan::float8::cuda

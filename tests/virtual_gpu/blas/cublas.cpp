// Products of cuBLAS, for VIRTUAL_GPU_LIBTORCH, which launches and doesn't compute; otherwise operations of aten are the CPU's, and nothing calls
// these. https://docs.nvidia.com/cuda/cublas, "cublasGemmEx" and "cublasSgemm".

#include <cublas_v2.h>

#include <algorithm>

#include "runtime/virtual_gpu.h"

struct cublasContext {
  cudaStream_t stream = nullptr;
};

namespace virtual_gpu {
namespace {

struct Matrix {
  const void* data = nullptr;
  cudaDataType type = CUDA_R_32F;
  int64_t rows = 0, columns = 0, leading = 0;  ///< as it is stored, column by column
  int64_t stride = 0;                          ///< from one matrix of a batch to the next

  bool is_possible() const { return rows >= 0 && columns >= 0 && leading >= std::max<int64_t>(1, rows); }
  Range range(int64_t batches, bool is_written) const {
    const size_t itemsize = type == CUDA_R_32F ? 4 : 2;
    const int64_t elements = (batches - 1) * stride + (columns - 1) * leading + rows;
    return {.data = data, .bytes = static_cast<size_t>(elements) * itemsize, .is_written = is_written};
  }
};

bool is_known(cudaDataType type) { return type == CUDA_R_32F || type == CUDA_R_16BF || type == CUDA_R_16F; }

cublasStatus_t launch(cublasHandle_t handle, const char* function, const Matrix& a, const Matrix& b, Matrix c,
                      int64_t batches = 1) {
  if (!runs_libtorch())
    not_supported(function,
                  "Operations of aten are computed by the CPU's kernels: see kernels/dispatch.cpp.");
  for (const Matrix& matrix : {a, b, c}) {
    if (!matrix.is_possible() || batches < 0) return CUBLAS_STATUS_INVALID_VALUE;
    if (!is_known(matrix.type))
      not_supported(std::string(function) + " with data type " + std::to_string(matrix.type),
                    "Add it to blas/cublas.cpp.");
  }
  if (c.rows == 0 || c.columns == 0 || batches == 0) return CUBLAS_STATUS_SUCCESS;
  std::vector<Range> ranges{c.range(batches, true)};
  for (const Matrix& factor : {a, b})
    if (factor.rows > 0 && factor.columns > 0) ranges.push_back(factor.range(batches, false));
  return submit(handle->stream, computation(function, std::move(ranges), [] {}))
             ? CUBLAS_STATUS_EXECUTION_FAILED
             : CUBLAS_STATUS_SUCCESS;
}

// C [m, n] from op(A) [m, k] and op(B) [k, n].
Matrix factor(const void* data, cudaDataType type, cublasOperation_t operation, int64_t rows, int64_t columns,
              int64_t leading, int64_t stride = 0) {
  if (operation != CUBLAS_OP_N) std::swap(rows, columns);
  return {data, type, rows, columns, leading, stride};
}

}  // namespace
}  // namespace virtual_gpu

using namespace virtual_gpu;

extern "C" {

cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  *handle = new cublasContext;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t of_a, cublasOperation_t of_b, int m,
                            int n, int k, const void*, const void* a, cudaDataType a_type, int lda,
                            const void* b, cudaDataType b_type, int ldb, const void*, void* c,
                            cudaDataType c_type, int ldc, cublasComputeType_t, cublasGemmAlgo_t) {
  return launch(handle, "cublasGemmEx", factor(a, a_type, of_a, m, k, lda),
                factor(b, b_type, of_b, k, n, ldb), {c, c_type, m, n, ldc});
}
cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t of_a,
                                          cublasOperation_t of_b, int m, int n, int k, const void*,
                                          const void* a, cudaDataType a_type, int lda, long long a_stride,
                                          const void* b, cudaDataType b_type, int ldb, long long b_stride,
                                          const void*, void* c, cudaDataType c_type, int ldc,
                                          long long c_stride, int batches, cublasComputeType_t,
                                          cublasGemmAlgo_t) {
  return launch(handle, "cublasGemmStridedBatchedEx", factor(a, a_type, of_a, m, k, lda, a_stride),
                factor(b, b_type, of_b, k, n, ldb, b_stride), {c, c_type, m, n, ldc, c_stride}, batches);
}
cublasStatus_t cublasSgemm_v2(cublasHandle_t handle, cublasOperation_t of_a, cublasOperation_t of_b, int m,
                              int n, int k, const float*, const float* a, int lda, const float* b, int ldb,
                              const float*, float* c, int ldc) {
  return launch(handle, "cublasSgemm", factor(a, CUDA_R_32F, of_a, m, k, lda),
                factor(b, CUDA_R_32F, of_b, k, n, ldb), {c, CUDA_R_32F, m, n, ldc});
}
cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t handle, cublasOperation_t of_a,
                                         cublasOperation_t of_b, int m, int n, int k, const float*,
                                         const float* a, int lda, long long a_stride, const float* b, int ldb,
                                         long long b_stride, const float*, float* c, int ldc,
                                         long long c_stride, int batches) {
  return launch(handle, "cublasSgemmStridedBatched", factor(a, CUDA_R_32F, of_a, m, k, lda, a_stride),
                factor(b, CUDA_R_32F, of_b, k, n, ldb, b_stride), {c, CUDA_R_32F, m, n, ldc, c_stride},
                batches);
}

}  // extern "C"

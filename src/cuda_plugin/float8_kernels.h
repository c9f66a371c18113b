#pragma once

// Float8 on a GPU: launches of float8_kernels.cu, which knows nothing of LibTorch. All return at once; the
// device's pointers are to stay valid until the stream has run them.

#include <cuda_runtime_api.h>

#include <cstdint>

namespace titan::float8::cuda {

enum class Source { Float, BFloat16 };
enum class Format { E4m3, E5m2 };

/// A matrix [rows, columns], row by row without gaps.
struct Matrix {
  const void* data = nullptr;
  Source source = Source::Float;
  int64_t rows = 0, columns = 0;
};

/// out: one fp32, or one for each row or column; starts as 0 but of rows.
void launch_amax(float* out, const Matrix& x, cudaStream_t stream);
void launch_amax_of_rows(float* out, const Matrix& x, cudaStream_t stream);
void launch_amax_of_columns(float* out, const Matrix& x, cudaStream_t stream);

/// largest / max(amax, 1e-12), in double.
void launch_scale(float* out, const float* amax, int64_t count, double largest, bool power_of_two,
                  cudaStream_t stream);

struct CastOptions {
  const float* scale = nullptr;
  bool scale_by_row = false;  ///< of the result; else one for all
  Format format = Format::E4m3;
};
/// out: [rows, columns], or [columns, rows] transposed.
void launch_cast(uint8_t* out, const Matrix& x, const CastOptions& options, cudaStream_t stream);
void launch_transposed_cast(uint8_t* out, const Matrix& x, const CastOptions& options, cudaStream_t stream);

}  // namespace titan::float8::cuda

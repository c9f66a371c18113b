#pragma once

// Float8 on a GPU: launches of float8_kernels.cu, which knows nothing of LibTorch. All return at once; the
// device's pointers are to stay valid until the stream has run them.

#include <cstdint>

#include <cuda_runtime_api.h>

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

// Casting blocks, many largest magnitudes and delayed scales on a GPU: launches of float8_block_kernels.cu,
// which knows nothing of LibTorch. All return at once; the device's pointers are to stay valid until the
// stream has run them.

struct BlockOptions {
  bool round_up = false;
  Format format = Format::E4m3;
};
/// Blocks of 32 along rows: out [rows, blocks * 32], exponents [rows, blocks].
void launch_cast_row_blocks(uint8_t* out, uint8_t* exponents, const Matrix& x, const BlockOptions& options,
                            cudaStream_t stream);
/// Along columns: out [columns, blocks * 32], exponents [columns, blocks].
void launch_cast_column_blocks(uint8_t* out, uint8_t* exponents, const Matrix& x, const BlockOptions& options,
                               cudaStream_t stream);

/// Elements [first, first + count) of a tensor whose largest magnitude goes into out[tensor].
struct AmaxPiece {
  const void* data = nullptr;
  int64_t count = 0;
  int64_t tensor = 0;
};
/// A block of threads a piece; `pieces`: on the device; out: fp32, starts as 0.
void launch_amax_of_pieces(float* out, const AmaxPiece* pieces, int64_t num_pieces, Source source,
                           cudaStream_t stream);

struct DelayedOptions {
  double largest = 0;  ///< of the format
  bool power_of_two = false;
  bool records = false;
};
/// One scale (delayed_scales.h).
void launch_delayed_scale(float* out, const float* amax, float* pending, const float* largest_of_history,
                          const DelayedOptions& options, cudaStream_t stream);

}  // namespace titan::float8::cuda

#pragma once

// Float8 on a GPU: functions that launch the kernels in float8_kernels.cu, which doesn't use LibTorch. They
// return at once; device memory must stay valid until the stream has run the kernel.

#include <cstdint>

#include <cuda_runtime_api.h>

#include "cuda_plugin/source.h"

namespace titan::float8::cuda {

using titan::cuda::Source;
enum class Format { E4m3, E5m2 };

/// A matrix [rows, columns], stored row by row without gaps.
struct Matrix {
  const void* data = nullptr;
  Source source = Source::Float;
  int64_t rows = 0, columns = 0;
};

/// out: one fp32, or one per row or column. The caller zeroes it, except for rows.
void launch_amax(float* out, const Matrix& x, cudaStream_t stream);
void launch_amax_of_rows(float* out, const Matrix& x, cudaStream_t stream);
void launch_amax_of_columns(float* out, const Matrix& x, cudaStream_t stream);

/// Elements [first, first + count) of a tensor whose largest magnitude goes to out[tensor].
struct AmaxPiece {
  const void* data = nullptr;
  int64_t count = 0;
  int64_t tensor = 0;
};
/// `pieces` are on the device. The caller zeroes out, fp32.
void launch_amax_of_pieces(float* out, const AmaxPiece* pieces, int64_t num_pieces, Source source,
                           cudaStream_t stream);

/// A scale is largest / max(amax, 1e-12), in double.
struct ScaleOptions {
  double largest = 0;  ///< the format's largest value
  bool power_of_two = false;
};
void launch_scale(float* out, const float* amax, int64_t count, const ScaleOptions& options,
                  cudaStream_t stream);

/// The inputs of a delayed scale ([Note: delayed scales] in titan/float8/convert.h). Each pointer is to one
/// fp32 on the device.
struct DelayedScale {
  const float* amax = nullptr;
  float* pending = nullptr;
  const float* largest_of_history = nullptr;
  bool records = false;
};
void launch_delayed_scale(float* out, const DelayedScale& delayed, const ScaleOptions& options,
                          cudaStream_t stream);

struct CastOptions {
  const float* scale = nullptr;
  bool scale_by_row = false;  ///< one scale per row of the result; else one for all
  Format format = Format::E4m3;
};
/// out: [rows, columns], or [columns, rows] if transposed.
void launch_cast(uint8_t* out, const Matrix& x, const CastOptions& options, cudaStream_t stream);
void launch_transposed_cast(uint8_t* out, const Matrix& x, const CastOptions& options, cudaStream_t stream);

/// Vectors in blocks of 32: data [vectors, blocks * 32], exponents [vectors, blocks].
struct CastBlocks {
  uint8_t* data = nullptr;
  uint8_t* exponents = nullptr;
};
struct BlockOptions {
  bool round_up = false;
  Format format = Format::E4m3;
};
/// Casts x's rows, or its columns, in blocks.
void launch_cast_row_blocks(const CastBlocks& out, const Matrix& x, const BlockOptions& options,
                            cudaStream_t stream);
void launch_cast_column_blocks(const CastBlocks& out, const Matrix& x, const BlockOptions& options,
                               cudaStream_t stream);

}  // namespace titan::float8::cuda

#pragma once

// Casting blocks, many largest magnitudes and delayed scales on a GPU: launches of float8_block_kernels.cu,
// which knows nothing of LibTorch. All return at once; the device's pointers are to stay valid until the
// stream has run them.

#include "cuda_plugin/float8_kernels.h"

namespace titan::float8::cuda {

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

#pragma once

// MXFP8: each 32 elements of a vector that a product sums over share a scale, which is a power of two and
// takes a byte (OCP Microscaling Formats 1.0; NVIDIA's units of compute capability 10.0 read it).
//
// [Note: scales of blocks] Such a scale is an exponent e (e8m0, Float8_e8m0fnu): the block's values are
// data * 2^(e - 127), and all of them NaN where e is 255. That is where the block holds a NaN or an infinity:
// torchao lets an infinity become a large number (docs/float8.md).

#include <ATen/core/Tensor.h>

#include "titan/float8/recipe.h"
#include "titan/ops/operand.h"

namespace titan::float8 {

/// Elements that share a scale.
inline constexpr int64_t kBlock = 32;

struct BlockCast {
  at::ScalarType dtype = at::kFloat8_e4m3fn;
  BlockRounding rounding = BlockRounding::Down;
  bool transposed = false;  ///< columns are summed over, and become the result's rows
  bool composed = false;    ///< by LibTorch's operations also where there is a kernel; the same bits
};

/// Rows (columns) in blocks, nearest, ties to even. x: [N, K] of floating point, not empty. data: [N, K], K
/// rounded up to whole blocks, with zeros, which add nothing to a sum; scale: [N, blocks]. Of columns: [K,
/// N].
ops::ScaledMatrix cast_blocks(const at::Tensor& x, const BlockCast& options);

/// The values in fp32, [vectors, whole blocks].
at::Tensor block_values(const ops::ScaledMatrix& matrix);

/// Whether the matrix has scales of blocks.
inline bool in_blocks(const ops::ScaledMatrix& matrix) {
  return matrix.scale.scalar_type() == at::kFloat8_e8m0fnu;
}

}  // namespace titan::float8

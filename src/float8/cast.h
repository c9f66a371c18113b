#pragma once

// From a matrix to 8 bits: the largest magnitude, the scale that brings it to the end of the format's range,
// and the values. One pass over the matrix each, by operations of the dispatcher (titan::float8_amax,
// float8_scale, float8_cast).
//
// [Note: not finite] A NaN or an infinity isn't hidden. A NaN makes its scale NaN, and with it all values
// under that scale; an infinity makes its scale 0, its own value NaN and the others 0, which dividing by the
// scale makes NaN. So the step's loss and gradient norm show it, as they would in high precision.

#include <cstdint>
#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>

#include "titan/float8/recipe.h"
#include "titan/ops/products.h"

namespace titan::float8 {

/// What one scale is for: all of a matrix [N, K], each row, or each column.
enum class Over { Matrix, Row, Column };

/// The largest magnitude, fp32, NaN if there is one: [] of the matrix, [N, 1] of the rows, [K, 1] of the
/// columns. x: [N, K], not empty.
at::Tensor amax(const at::Tensor& x, Over over);

/// Of each tensor as a whole, [n]: one pass over all of them (a model's weights). None is empty.
at::Tensor amax_many(at::TensorList xs);

/// fp32: largest value of `dtype` / max(amax, 1e-12), computed in double; with `power_of_two` rounded down to
/// one.
at::Tensor scale_of(const at::Tensor& amax, at::ScalarType dtype, bool power_of_two);

/// x * scale in fp32, held within the format's range, rounded to nearest, ties to even. scale: [], or one for
/// each row of the result. Result: [N, K], or [K, N] if `transposed`.
at::Tensor cast(const at::Tensor& x, const at::Tensor& scale, at::ScalarType dtype, bool transposed);

/// 448 of e4m3, 57344 of e5m2. Throws Error for another dtype.
double largest_value(at::ScalarType dtype);

// MXFP8: each 32 elements of a vector that a product sums over share a scale, which is a power of two and
// takes a byte (OCP Microscaling Formats 1.0; NVIDIA's units of compute capability 10.0 read it).
//
// [Note: scales of blocks] Such a scale is an exponent e (e8m0, Float8_e8m0fnu): the block's values are
// data * 2^(e - 127), and all of them NaN where e is 255. That is where the block holds a NaN or an infinity:
// torchao lets an infinity become a large number (docs/float8.md).

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

namespace titan::float8::composite {

// The operations of float8 in terms of LibTorch's: what runs where there is no kernel of ours, and what the
// kernels equal bit for bit. Arguments as in library.cpp's schemas.

at::Tensor amax(const at::Tensor& x, std::optional<int64_t> dim);
at::Tensor scale_of(const at::Tensor& amax, at::ScalarType dtype, bool power_of_two);
at::Tensor cast(const at::Tensor& x, const at::Tensor& scale, at::ScalarType dtype, bool transposed);

// Casting blocks in terms of LibTorch's operations: what runs where there is no kernel of ours, and what the
// kernels equal bit for bit.

/// Data and scales of titan::float8_cast_blocks (block_cast.cpp).
std::tuple<at::Tensor, at::Tensor> cast_blocks(const at::Tensor& x, at::ScalarType dtype, bool round_up,
                                               bool transposed);

/// Of each tensor, one after the other: what titan::float8_amax_many's kernels equal bit for bit.
at::Tensor amax_many(at::TensorList xs);

/// titan::float8_delayed_scale (delayed_scales.cpp) in terms of LibTorch's operations, which its kernels
/// equal.
at::Tensor delayed_scale(const at::Tensor& amax, const at::Tensor& pending, const at::Tensor& largest,
                         at::ScalarType dtype, bool power_of_two, bool records);

}  // namespace titan::float8::composite

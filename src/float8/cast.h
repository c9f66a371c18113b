#pragma once

// Casting a matrix to 8 bits: its largest magnitude, the scale that maps this to the end of the format's
// range, and the cast values. Each is one pass over the matrix, by an operation of the dispatcher
// (titan::float8_amax, float8_scale, float8_cast, float8_cast_blocks).
//
// [Note: not finite] A NaN or an infinity isn't hidden. A NaN makes its scale NaN, and so all values with
// that scale. An infinity makes its scale 0, its own value NaN and the others 0, which become NaN when they
// are divided by the scale. So the step's loss and gradient norm show it, as they would in high precision.
//
// [Note: scales of blocks] In MXFP8, each 32 elements of a vector that a product sums over share a scale of
// one byte, a power of two (OCP Microscaling Formats 1.0; GPUs of compute capability 10.0 support it). The
// byte is an exponent e (e8m0, Float8_e8m0fnu): the block's values are data * 2^(e - 127). If e is 255, all
// values are NaN, because the block has a NaN or an infinity (torchao turns an infinity into a large number).

#include <cstdint>
#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>

#include "titan/float8/convert.h"
#include "titan/ops/linear.h"

namespace titan::float8 {

/// The elements that share a scale: a whole matrix [N, K], each row, or each column.
enum class Over { Matrix, Row, Column };

/// The largest magnitude, fp32: [] for the matrix, [N, 1] for the rows, [K, 1] for the columns; NaN if there
/// is one. x: [N, K], not empty.
at::Tensor amax(const at::Tensor& x, Over over);

/// The largest magnitude of each tensor, [n], in one pass over all tensors (a model's weights). None may be
/// empty.
at::Tensor amax_many(at::TensorList xs);

/// The largest value of `dtype` / max(amax, 1e-12), computed in double, rounded to fp32. With `power_of_two`,
/// rounded down to one.
at::Tensor scale_of(const at::Tensor& amax, at::ScalarType dtype, bool power_of_two);

/// The scale [] from `history` for a matrix whose largest magnitude is amax []. Records amax as pending if
/// `records`.
at::Tensor delayed_scale(const at::Tensor& amax, const DelayedScale& history, at::ScalarType dtype,
                         bool power_of_two, bool records);

/// x * scale in fp32, clamped to the format's range, rounded to nearest, ties to even. scale: [], or one per
/// row of the result. Result: [N, K], or [K, N] if `transposed`.
at::Tensor cast(const at::Tensor& x, const at::Tensor& scale, at::ScalarType dtype, bool transposed);

/// 448 for e4m3, 57344 for e5m2. Throws Error for another dtype.
double largest_value(at::ScalarType dtype);

/// The number of elements in a block, which share a scale.
inline constexpr int64_t kBlock = 32;
/// The exponent of a block that has a NaN or an infinity.
inline constexpr int kNotFinite = 255;
/// The exponent of the last power of two in the format's range, 256 or 32768.
constexpr int largest_exponent(at::ScalarType dtype) { return dtype == at::kFloat8_e4m3fn ? 8 : 15; }

struct BlockCast {
  at::ScalarType dtype = at::kFloat8_e4m3fn;
  BlockRounding rounding = BlockRounding::Down;
  bool transposed = false;  ///< the product sums over columns; they become the result's rows
  bool composed = false;    ///< use LibTorch's operations even if there is a kernel; the results are the same
};

/// Casts rows (or columns) in blocks, rounded to nearest, ties to even. x: [N, K], floating point, not empty.
/// data: [N, K], with K padded to whole blocks by zeros, which add nothing to a sum; scale: [N, blocks].
/// Transposed: [K, N].
ops::ScaledMatrix cast_blocks(const at::Tensor& x, const BlockCast& options);

/// The values in fp32, [vectors, whole blocks].
at::Tensor block_values(const ops::ScaledMatrix& matrix);

/// Whether the matrix has scales of blocks.
inline bool in_blocks(const ops::ScaledMatrix& matrix) {
  return matrix.scale.scalar_type() == at::kFloat8_e8m0fnu;
}

/// The operations as compositions of LibTorch's. They run if there is no kernel, and kernels match them bit
/// for bit. Arguments are as in the schemas in cast.cpp.
namespace composite {

at::Tensor amax(const at::Tensor& x, std::optional<int64_t> dim);
at::Tensor amax_many(at::TensorList xs);
at::Tensor scale_of(const at::Tensor& amax, at::ScalarType dtype, bool power_of_two);
at::Tensor cast(const at::Tensor& x, const at::Tensor& scale, at::ScalarType dtype, bool transposed);
std::tuple<at::Tensor, at::Tensor> cast_blocks(const at::Tensor& x, at::ScalarType dtype, bool round_up,
                                               bool transposed);
at::Tensor delayed_scale(const at::Tensor& amax, const at::Tensor& pending, const at::Tensor& largest,
                         at::ScalarType dtype, bool power_of_two, bool records);

}  // namespace composite
}  // namespace titan::float8

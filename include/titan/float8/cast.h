#pragma once

// From a matrix to 8 bits: the largest magnitude, the scale that brings it to the end of the format's range,
// and the values. One pass over the matrix each, by operations of the dispatcher (titan::float8_amax,
// float8_scale, float8_cast).
//
// [Note: not finite] A NaN or an infinity isn't hidden. A NaN makes its scale NaN, and with it all values
// under that scale; an infinity makes its scale 0, its own value NaN and the others 0, which dividing by the
// scale makes NaN. So the step's loss and gradient norm show it, as they would in high precision.

#include <ATen/core/Tensor.h>

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

}  // namespace titan::float8

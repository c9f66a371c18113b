#pragma once

// Casting a matrix to 8 bits: its largest magnitude, the scale that maps this to the end of the format's
// range, and the cast values. Each is one pass over the matrix, by an operation of the dispatcher
// (titan::float8_amax, float8_scale, float8_cast, float8_cast_blocks). GPUs have operations that do more in
// one pass ([Note: casts on GPUs]).
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
#include <vector>

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
/// The same with its inverse, without data.
ops::ScaledMatrix scale_and_inverse_of(const at::Tensor& amax, at::ScalarType dtype, bool power_of_two);

/// The scale [] from `history` for a matrix whose largest magnitude is amax, [] or [n] for parts of it.
/// Records the magnitude as pending if `records`.
at::Tensor delayed_scale(const at::Tensor& amax, const DelayedScale& history, at::ScalarType dtype,
                         bool power_of_two, bool records);

/// x * scale in fp32, clamped to the format's range, rounded to nearest, ties to even. scale: [], or one per
/// row of the result. Result: [N, K], or [K, N] if `transposed`.
at::Tensor cast(const at::Tensor& x, const at::Tensor& scale, at::ScalarType dtype, bool transposed);

/// The same into each of `outs`, each x with its own scale: contiguous, of one dtype, with as many elements as x.
/// scales: [n].
void cast_into_many(at::TensorList outs, at::TensorList xs, const at::Tensor& scales);

// [Note: casts on GPUs]
// On a GPU, each launch and each pass over a matrix counts. So one operation measures parts of a matrix, and
// another one finds the largest of them, the scale and its inverse, and casts along rows and down columns in
// one pass. Rows that fit into registers are measured and cast in one pass, which also measures their
// columns. One launch casts several matrices. With a delayed scale, a matrix is measured while it is cast.
// Compositions call the operations above, and leave inverses undefined.

/// The form of scales that a cast makes.
struct ScaleForm {
  at::ScalarType dtype = at::kFloat8_e4m3fn;
  bool power_of_two = false;
};

/// The largest magnitude of each part of x, [n] in fp32; with Over::Column, of each column in each part, [n, K].
at::Tensor magnitudes(const at::Tensor& x, Over over);

struct BothCasts {
  ops::ScaledMatrix along_rows, down_columns;  ///< undefined: not asked for
};
/// Casts with one scale, made from magnitudes [n].
BothCasts cast_measured(const at::Tensor& x, const at::Tensor& magnitudes, const ScaleForm& form, bool rows,
                        bool columns);
/// Casts with this scale [].
BothCasts cast_scaled(const at::Tensor& x, const at::Tensor& scale, at::ScalarType dtype, bool rows,
                      bool columns);

/// The same with delayed_scale()'s scale, once ranks have the same histories. If the matrix isn't finite, its scale is NaN,
/// but the data may have been cast with the history's.
BothCasts cast_delayed(const at::Tensor& x, const DelayedScale& history, const ScaleForm& form, bool records,
                       bool rows, bool columns);

struct MeasuredRows {
  ops::ScaledMatrix along_rows;
  at::Tensor magnitudes;  ///< the columns' in each part of the rows; undefined: not asked for
};
/// Casts each row with its own scale.
MeasuredRows cast_rows(const at::Tensor& x, const ScaleForm& form, bool measures_columns);
/// Casts each column with its own scale, made from magnitudes [n, K].
ops::ScaledMatrix cast_columns(const at::Tensor& x, const at::Tensor& magnitudes, const ScaleForm& form);

struct ManyCasts {
  ScaleForm form;
  bool by_vector = false;   ///< one scale for each row of the result, not one for each matrix
  bool transposed = false;  ///< along columns
};
/// Casts matrices of one dtype. scales: theirs, without data, or empty: they are made.
std::vector<ops::ScaledMatrix> cast_many(at::TensorList xs, const std::vector<ops::ScaledMatrix>& scales,
                                         const ManyCasts& how);

/// The transposes of matrices of bytes, contiguous.
std::vector<at::Tensor> transpose_many(at::TensorList xs);

/// Moves magnitudes into delayed scales' histories, a row for each matrix: history [n, steps] shifts by one and begins with
/// pending [n], which becomes 0; largest [n] is the maximum of the new history.
void update_histories(const at::Tensor& history, const at::Tensor& pending, const at::Tensor& largest);

/// out [N, M] = a b^T for a [N, K] and b [M, K] whose vectors have scales. out: fp32 or bf16, contiguous.
/// Inverses: [N, 1] and [M, 1], or [] if the whole matrix has one.
struct VectorProduct {
  at::Tensor a_NK, b_MK;
  at::Tensor inverse_a, inverse_b;
  bool fast_accumulation = false;
  bool power_of_two_scales = false;
};
void multiply_vectors(const at::Tensor& out_NM, const VectorProduct& product);
/// out += a b^T, or out = a b^T. The matrices may also have one scale each, or scales of blocks in the hardware's order, in place of the inverses. On
/// GPUs there is no other tensor for fp32 and bf16, except to add products of vectors where compute capability isn't 9.x.
void put_product(const at::Tensor& out_NM, const VectorProduct& product, bool adds);

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
  bool for_hardware = false;  ///< scales in blocked_layout()
};

/// The number of scales in blocked_layout(), with padding.
constexpr int64_t size_of_blocked_layout(int64_t vectors, int64_t blocks) {
  return (vectors + 127) / 128 * 128 * ((blocks + 3) / 4 * 4);
}

/// Casts rows (or columns) in blocks, rounded to nearest, ties to even. x: [N, K], floating point, not empty.
/// data: [N, K], with K padded to whole blocks by zeros, which add nothing to a sum; scale: [N, blocks].
/// Transposed: [K, N].
ops::ScaledMatrix cast_blocks(const at::Tensor& x, const BlockCast& options);
/// Casts rows and columns, with one read of x on a GPU. The options' `transposed` and `composed` are false.
BothCasts cast_blocks_both(const at::Tensor& x, const BlockCast& options);

/// Scales [vectors, blocks] in cuBLAS's layout ("1D block scaling factors layout"): tiles of 128 vectors by
/// four blocks, 512 bytes each, one after the other, padded with zeros; a tensor of one dimension.
at::Tensor blocked_layout(const at::Tensor& scale);

/// The values in fp32, [vectors, whole blocks]. Scales aren't in blocked_layout().
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
std::tuple<at::Tensor, at::Tensor> scale_and_inverse_of(const at::Tensor& amax, at::ScalarType dtype,
                                                        bool power_of_two);
at::Tensor cast(const at::Tensor& x, const at::Tensor& scale, at::ScalarType dtype, bool transposed);
std::tuple<at::Tensor, at::Tensor> cast_blocks(const at::Tensor& x, at::ScalarType dtype, bool round_up,
                                               bool transposed, bool for_hardware);
at::Tensor delayed_scale(const at::Tensor& amax, const at::Tensor& pending, const at::Tensor& largest,
                         at::ScalarType dtype, bool power_of_two, bool records);
void cast_into_many(at::TensorList outs, at::TensorList xs, const at::Tensor& scales);
at::Tensor magnitudes(const at::Tensor& x, bool of_columns);
using FourTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
FourTensors cast_both(const at::Tensor& x, const std::optional<at::Tensor>& magnitudes,
                      const std::optional<at::Tensor>& scale, at::ScalarType dtype, bool power_of_two,
                      bool rows, bool columns);
FourTensors cast_blocks_both(const at::Tensor& x, at::ScalarType dtype, bool round_up, bool for_hardware);
FourTensors cast_rows(const at::Tensor& x, at::ScalarType dtype, bool power_of_two, bool measures_columns);
void put_product(const at::Tensor& out, const at::Tensor& mat1, const at::Tensor& mat2,
                 const at::Tensor& scale_1, const at::Tensor& scale_2, bool fast_accumulation,
                 bool power_of_two_scales, bool adds);
std::tuple<at::Tensor, at::Tensor, at::Tensor> cast_columns(const at::Tensor& x, const at::Tensor& magnitudes,
                                                            at::ScalarType dtype, bool power_of_two);
FourTensors cast_delayed(const at::Tensor& x, const at::Tensor& pending, const at::Tensor& largest,
                         at::ScalarType dtype, bool power_of_two, bool records, bool rows, bool columns);
using ThreeLists = std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>, std::vector<at::Tensor>>;
ThreeLists cast_many(at::TensorList xs, at::TensorList scales, at::ScalarType dtype, bool power_of_two,
                     bool by_vector, bool transposed);
std::vector<at::Tensor> transpose_many(at::TensorList xs);
void update_histories(const at::Tensor& history, const at::Tensor& pending, const at::Tensor& largest);
void multiply_vectors(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                      const at::Tensor& inverse_a, const at::Tensor& inverse_b, bool fast_accumulation,
                      bool power_of_two_scales);

}  // namespace composite
}  // namespace titan::float8

#pragma once

// What products multiply.

#include <utility>

#include <ATen/core/Tensor.h>

namespace titan::ops {

/// A matrix in fewer bits: its values are data / scale. Each row of `data` is a vector that a product sums
/// over, so a matrix whose columns are summed over lies transposed here.
struct ScaledMatrix {
  at::Tensor data;   ///< [vectors, elements], of an 8-bit floating-point dtype; perhaps a transposed view
  at::Tensor scale;  ///< fp32: [] for the whole matrix, [vectors, 1] for each vector; Float8_e8m0fnu:
                     ///< [vectors, blocks of 32 elements], by which data is multiplied (float8/block_cast.h)
  bool defined() const { return data.defined(); }
};

/// [Note: operands]
/// Each of a linear layer's three matrices is multiplied twice: along its rows (x and W in the output, g in
/// the input's gradient) and down its columns (W in the input's gradient, g and x in the weight's). Plain
/// products read `values`; recipes of fewer bits cast a matrix once for all products that can use the result,
/// and may then drop `values`. A form that isn't there is made from `values` by the product that needs it.
struct Operand {
  Operand() = default;
  Operand(at::Tensor matrix)  // NOLINT(google-explicit-constructor): a matrix is an operand
      : values(std::move(matrix)), dtype(values.scalar_type()) {}

  at::Tensor values;  ///< undefined where the scaled forms suffice
  at::ScalarType dtype =
      at::kFloat;  ///< of `values`, whether they are here or not; a product's result has it
  ScaledMatrix along_rows;
  ScaledMatrix down_columns;
};

/// Where a weight is whose parameter has no memory, as it was gathered in fewer bits.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  /// To be asked for by each product: memory comes and goes with the layer's use.
  virtual Operand weight() const = 0;
};

}  // namespace titan::ops

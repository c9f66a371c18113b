#pragma once

// An input that an operation keeps for its backward: itself, or what makes it again.

#include <memory>

#include <ATen/ops/empty_like.h>

#include "ops/autograd_node.h"
#include "titan/ops/products.h"
#include "titan/ops/saved_outputs.h"

namespace titan::ops {

/// [..., F] as [N, F]; F may be 0.
inline at::Tensor as_rows(const at::Tensor& x) {
  if (x.dim() == 2) return x;
  return x.reshape({c10::multiply_integers(x.sizes().begin(), x.sizes().end() - 1), x.size(-1)});
}

/// The same of an operand's values.
inline Operand as_rows(Operand operand) {
  if (operand.values.defined()) operand.values = as_rows(operand.values);
  return operand;
}

/// What `products` keep of an input. Where saved tensors are dropped, the forms that they would cast are on
/// the meta device ([Note: dropped tensors]).
inline Operand kept_of(const Operand& input, const Products& products) {
  BelowAutograd guard;
  if (!saved_tensors_are_dropped()) return products.kept(input);
  const auto shape_of = [](const at::Tensor& tensor) {
    return tensor.defined() ? at::empty_like(tensor, tensor.options().device(at::kMeta)) : tensor;
  };
  const auto shapes_of = [&](const ScaledMatrix& matrix) {
    return ScaledMatrix{shape_of(matrix.data), shape_of(matrix.scale)};
  };
  Operand shapes;
  shapes.dtype = input.dtype;
  shapes.values = shape_of(input.values);
  shapes.along_rows = shapes_of(input.along_rows);
  shapes.down_columns = shapes_of(input.down_columns);
  Operand kept = products.kept(shapes);
  if (kept.values.defined()) kept.values = input.values;
  return kept;
}

/// [Note: outputs made again]
/// A product's weight gradient needs its input, and an elementwise operation before it needs its own inputs:
/// kept, the operation's output is memory for something that costs one pass over its inputs. (SwiGLU's is a
/// sixth of what a Llama block keeps.) So the product keeps the operation's node instead, which it holds
/// anyway, and asks that for the output again: the same bits, and the node can't have given up its inputs
/// yet, as its backward waits for the product's.
class RemakingNode : public BackwardNode {
 public:
  /// The output once more, from what the node saved. It holds on to that until its own backward: under
  /// activation checkpointing asking twice would compute it twice.
  virtual at::Tensor remake() = 0;
};

/// An operand of a product between forward and backward.
class SavedInput {
 public:
  SavedInput() = default;
  /// The values.
  explicit SavedInput(const at::Tensor& input)
      : maker_(std::dynamic_pointer_cast<RemakingNode>(input.grad_fn())), dtype_(input.scalar_type()) {
    if (!maker_) values_ = save_input(input);
  }
  /// Of an input that nothing makes again.
  explicit SavedInput(const Operand& kept) : dtype_(kept.dtype) {
    if (kept.values.defined()) values_ = save_input(kept.values);
    along_rows_ = Scaled(kept.along_rows);
    down_columns_ = Scaled(kept.down_columns);
  }
  /// `operand`: of `input` for the forward; of it is saved what `products` keep. Of an input that is made
  /// again nothing is but the scale, where the matrix has one.
  SavedInput(const at::Tensor& input, const Operand& operand, const Products& products)
      : dtype_(operand.dtype) {
    maker_ = std::dynamic_pointer_cast<RemakingNode>(input.grad_fn());
    if (!maker_) {
      const Operand kept = kept_of(operand, products);
      if (kept.values.defined()) values_ = save_input(input);
      along_rows_ = Scaled(kept.along_rows);
      down_columns_ = Scaled(kept.down_columns);
    } else if (operand.along_rows.scale.defined() && operand.along_rows.scale.dim() == 0) {
      scale_ = save_input(operand.along_rows.scale);
    }
  }
  /// With `values` in the input's shape.
  Operand unpack() const {
    Operand operand;
    if (maker_) {
      operand = maker_->remake();
      operand.along_rows.scale = scale_.unpack();
      return operand;
    }
    operand.values = values_.unpack();
    operand.dtype = dtype_;
    operand.along_rows = along_rows_.unpack();
    operand.down_columns = down_columns_.unpack();
    return operand;
  }
  void reset_data() {
    scale_.reset_data();
    if (maker_) return;
    values_.reset_data();
    along_rows_.reset_data();
    down_columns_.reset_data();
  }

 private:
  // Under activation checkpointing each tensor is asked for by itself.
  struct Scaled {
    Scaled() = default;
    explicit Scaled(const ScaledMatrix& matrix) {
      if (!matrix.defined()) return;
      data = save_input(matrix.data);
      scale = save_input(matrix.scale);
    }
    ScaledMatrix unpack() const { return {data.unpack(), scale.unpack()}; }
    void reset_data() {
      data.reset_data();
      scale.reset_data();
    }
    SavedVariable data, scale;
  };

  std::shared_ptr<RemakingNode> maker_;
  SavedVariable scale_;  // of what `maker_` makes
  SavedVariable values_;
  Scaled along_rows_, down_columns_;
  at::ScalarType dtype_ = at::kFloat;
};

}  // namespace titan::ops

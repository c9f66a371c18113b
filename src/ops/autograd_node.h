#pragma once

// What our operations share towards the autograd engine. Hand-written nodes rather than
// torch::autograd::Function: they hold sinks and products, and cost a third of its host time.

#include <memory>

#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include "ops/saved_outputs.h"
#include "titan/core/error.h"
#include "titan/ops/products.h"

namespace titan::ops {

using torch::autograd::compute_requires_grad;
using torch::autograd::SavedVariable;
using torch::autograd::set_history;
using torch::autograd::variable_list;

/// The backward of an operation with one output.
class BackwardNode : public torch::autograd::Node {
 public:
  variable_list apply(variable_list&& grads) final {
    TITAN_CHECK(!at::GradMode::is_enabled(), name(),
                " has no second derivative: call backward with create_graph = false");
    if (!grads[0].defined()) return variable_list(num_outputs());
    return backward(grads[0]);
  }

 protected:
  virtual variable_list backward(const at::Tensor& grad) = 0;
};

/// The node of an operation on `inputs`, whose gradients are theirs, in this order. set_history(output, node)
/// makes it the output's.
template <class NodeType, class... Inputs>
std::shared_ptr<NodeType> make_node(const Inputs&... inputs) {
  auto node = std::shared_ptr<NodeType>(new NodeType(), torch::autograd::deleteNode);
  node->set_next_edges(torch::autograd::collect_next_edges(inputs...));
  return node;
}

/// Records `output` as computed from `inputs`.
template <class NodeType, class... Inputs>
std::shared_ptr<NodeType> record(const at::Tensor& output, const Inputs&... inputs) {
  auto node = make_node<NodeType>(inputs...);
  torch::autograd::set_history(output, node);
  return node;
}

inline SavedVariable save_input(const at::Tensor& tensor) {
  return SavedVariable(tensor, /*is_output=*/false);
}

/// Below it, LibTorch's operations aren't recorded and make no views in autograd's sense.
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

// An input that an operation keeps for its backward: itself, or what makes it again.

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

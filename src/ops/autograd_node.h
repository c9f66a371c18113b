#pragma once

// Our operations' interface to the autograd engine: hand-written nodes, and the inputs that they keep for the
// backward. We use nodes instead of torch::autograd::Function because nodes can hold sinks and products and
// take a third of its host time.

#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include "ops/saved_outputs.h"
#include "titan/core/error.h"
#include "titan/ops/linear.h"

namespace titan::ops {

using torch::autograd::compute_requires_grad;
using torch::autograd::SavedVariable;
using torch::autograd::set_history;
using torch::autograd::variable_list;

inline void refuse_second_derivative(const torch::autograd::Node& node) {
  TITAN_CHECK(!at::GradMode::is_enabled(), node.name(),
              " has no second derivative: call backward with create_graph = false");
}

/// The backward of an operation with one output.
class BackwardNode : public torch::autograd::Node {
 public:
  variable_list apply(variable_list&& grads) final {
    refuse_second_derivative(*this);
    if (!grads[0].defined()) return variable_list(num_outputs());
    return backward(grads[0]);
  }

 protected:
  virtual variable_list backward(const at::Tensor& grad) = 0;
};

/// Makes the node of an operation on `inputs`. Its results are their gradients, in this order. Attach it to
/// the output by set_history(output, node).
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
  set_history(output, node);
  return node;
}

/// Replaces the `tensors` that require gradients by outputs of `node`, whose backward passes on their
/// gradients once all of them have arrived. Returns false if none requires a gradient.
inline bool insert_identity(const std::shared_ptr<torch::autograd::Node>& node,
                            at::ArrayRef<at::Tensor*> tensors) {
  std::vector<at::Tensor*> with_gradient;
  for (at::Tensor* tensor : tensors)
    if (tensor->requires_grad()) with_gradient.push_back(tensor);
  if (with_gradient.empty()) return false;
  torch::autograd::edge_list edges;
  for (at::Tensor* tensor : with_gradient) edges.push_back(torch::autograd::impl::gradient_edge(*tensor));
  node->set_next_edges(std::move(edges));
  for (at::Tensor* tensor : with_gradient) {
    at::Tensor passed = tensor->detach();
    set_history(passed, node);
    *tensor = std::move(passed);
  }
  return true;
}

inline SavedVariable save_input(const at::Tensor& tensor) {
  return SavedVariable(tensor, /*is_output=*/false);
}

/// [..., F] as [N, F]; F may be 0.
inline at::Tensor as_rows(const at::Tensor& x) {
  if (x.dim() == 2) return x;
  return x.reshape({c10::multiply_integers(x.sizes().begin(), x.sizes().end() - 1), x.size(-1)});
}
inline Operand as_rows(Operand operand) {
  if (operand.values.defined()) operand.values = as_rows(operand.values);
  return operand;
}

/// The form of an input that `products` keep. If saved tensors are dropped, casts are made on the meta device
/// ([Note: dropped tensors]).
inline Operand kept_of(const Operand& input, const Products& products) {
  BelowAutograd guard;
  if (!saved_tensors_are_dropped()) return products.kept(input);
  const auto shape_of = [](const at::Tensor& tensor) {
    return tensor.defined() ? at::empty_like(tensor, tensor.options().device(at::kMeta)) : tensor;
  };
  const auto shapes_of = [&](const ScaledMatrix& matrix) {
    return ScaledMatrix{shape_of(matrix.data), shape_of(matrix.scale), shape_of(matrix.inverse)};
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

/// [Note: recomputed outputs]
/// A product's weight gradient needs the product's input, and an elementwise operation before it needs its
/// own inputs. Keeping that operation's output, too, would waste memory, because recomputing it takes one
/// pass over its inputs. (SwiGLU's output is a sixth of the tensors that a Llama block keeps.) So the product
/// keeps the operation's node instead, which the graph holds anyway, and asks it to recompute the output. The
/// result has the same bits. The node still has its inputs then, because its backward waits for the
/// product's.
class RecomputingNode : public BackwardNode {
 public:
  /// Unpacks the saved inputs. The node keeps them until its own backward, because with activation checkpointing,
  /// unpacking twice would compute them twice.
  virtual void unpack_inputs() = 0;
  /// Computes the output again from the saved inputs.
  virtual at::Tensor recompute() = 0;
  /// The same for a caller that already knows the output's gradient, which it is about to return. The node computes its own
  /// backward in the same pass over its inputs, and keeps the result for a call with this very gradient; with any other one (a
  /// second use of the output, a hook), it computes again.
  virtual at::Tensor recompute_with_backward(const at::Tensor& grad) = 0;
};

/// An operand of a product between forward and backward.
class SavedInput {
 public:
  SavedInput() = default;
  /// Whether the node that made the input computes it again for the backward.
  static bool recomputes(const at::Tensor& input) {
    return dynamic_cast<const RecomputingNode*>(input.grad_fn().get()) != nullptr;
  }

  /// Saves the input's values.
  explicit SavedInput(const at::Tensor& input)
      : maker_(std::dynamic_pointer_cast<RecomputingNode>(input.grad_fn())), dtype_(input.scalar_type()) {
    if (!maker_) values_ = save_input(input);
  }
  /// Saves the forms of an input that no node can recompute.
  explicit SavedInput(const Operand& kept) : dtype_(kept.dtype) { save_forms(kept, kept.values); }
  /// Saves the form of `input` that `products` keep; the forward multiplied it as `operand`. For an input
  /// that will be recomputed, only the scale is saved, if the whole matrix has one.
  SavedInput(const at::Tensor& input, const Operand& operand, const Products& products)
      : maker_(std::dynamic_pointer_cast<RecomputingNode>(input.grad_fn())), dtype_(operand.dtype) {
    if (!maker_) {
      save_forms(kept_of(operand, products), input);
    } else if (operand.along_rows.scale.defined() && operand.along_rows.scale.dim() == 0) {
      scale_ = save_input(operand.along_rows.scale);
    }
  }

  /// The operand, with `values` in the input's shape. grad: the input's whole gradient, if it is known and returned from the
  /// same node.
  Operand unpack(const at::Tensor& grad = {}) const {
    Operand operand = unpack_saved();
    recompute(operand, grad);
    return operand;
  }
  /// The two halves of unpack(). Only the first may run a checkpointed layer again.
  Operand unpack_saved() const {
    Operand operand;
    operand.dtype = dtype_;
    if (maker_) {
      maker_->unpack_inputs();
      operand.along_rows.scale = scale_.unpack();
      return operand;
    }
    operand.values = values_.unpack();
    operand.along_rows = along_rows_.unpack();
    operand.down_columns = down_columns_.unpack();
    return operand;
  }
  void recompute(Operand& operand, const at::Tensor& grad = {}) const {
    if (maker_) operand.values = grad.defined() ? maker_->recompute_with_backward(grad) : maker_->recompute();
  }
  void reset_data() {
    scale_.reset_data();
    if (maker_) return;
    values_.reset_data();
    along_rows_.reset_data();
    down_columns_.reset_data();
  }

 private:
  // Separate variables, because activation checkpointing handles each tensor separately.
  struct Scaled {
    Scaled() = default;
    explicit Scaled(const ScaledMatrix& matrix) {
      if (!matrix.defined()) return;
      data = save_input(matrix.data);
      scale = save_input(matrix.scale);
      if (matrix.inverse.defined()) inverse = save_input(matrix.inverse);
    }
    ScaledMatrix unpack() const { return {data.unpack(), scale.unpack(), inverse.unpack()}; }
    void reset_data() {
      data.reset_data();
      scale.reset_data();
      inverse.reset_data();
    }
    SavedVariable data, scale, inverse;
  };

  void save_forms(const Operand& kept, const at::Tensor& values) {
    if (kept.values.defined()) values_ = save_input(values);
    along_rows_ = Scaled(kept.along_rows);
    down_columns_ = Scaled(kept.down_columns);
  }

  std::shared_ptr<RecomputingNode> maker_;
  SavedVariable scale_;  // scale of the output of `maker_`
  SavedVariable values_;
  Scaled along_rows_, down_columns_;
  at::ScalarType dtype_ = at::kFloat;
};

}  // namespace titan::ops

#pragma once

// What our operations share towards the autograd engine. Hand-written nodes rather than
// torch::autograd::Function: they hold sinks and products, and cost a third of its host time.

#include <memory>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include "titan/core/error.h"

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

}  // namespace titan::ops

#pragma once

// What nodes of several linear layers over one input share.

#include <algorithm>
#include <memory>
#include <vector>

#include "ops/autograd_node.h"
#include "titan/ops/joint_linear.h"

namespace titan::ops {

/// [..., F] as [N, F]; F may be 0.
inline at::Tensor as_rows(const at::Tensor& x) {
  if (x.dim() == 2) return x;
  return x.reshape({c10::multiply_integers(x.sizes().begin(), x.sizes().end() - 1), x.size(-1)});
}

/// Hands a weight's gradient to its sink, or returns it.
inline at::Tensor weight_gradient(const std::shared_ptr<const Products>& products,
                                  const std::shared_ptr<GradSink>& sink, const at::Tensor& grad,
                                  const at::Tensor& x) {
  const at::Tensor grad_NO = as_rows(grad), x_NI = as_rows(x);
  if (!sink) return products->grad_weight(grad_NO, x_NI);
  sink->accept(WeightGrad{products, grad_NO, x_NI});
  return {};
}

/// Inputs: x, then the weights. The engine waits for the gradients of all outputs that have one.
class JointNode : public torch::autograd::Node {
 public:
  variable_list apply(variable_list&& grads) final {
    TITAN_CHECK(!at::GradMode::is_enabled(), name(),
                " has no second derivative: call backward with create_graph = false");
    variable_list results(1 + weights.size());
    if (std::any_of(grads.begin(), grads.end(), [](const at::Tensor& g) { return g.defined(); }))
      backward(grads, results);
    return results;
  }
  void release_variables() override {
    x.reset_data();
    for (SavedVariable& weight : weights) weight.reset_data();
  }

  SavedVariable x;  // what the products multiplied
  std::vector<SavedVariable> weights;
  std::vector<std::shared_ptr<GradSink>> sinks;
  std::shared_ptr<const Products> products;

 protected:
  virtual void backward(const variable_list& grads, variable_list& results) = 0;

  /// Into results[1...].
  void weight_gradients(const variable_list& grads, variable_list& results) {
    unpack_x(grads);
    for (size_t i = 0; i < weights.size(); ++i)
      if (wants_weight(i, grads)) results[i + 1] = weight_gradient(products, sinks[i], grads[i], unpacked_x_);
    unpacked_x_.reset();
  }
  void unpack_x(const variable_list& grads) {
    for (size_t i = 0; i < weights.size() && !unpacked_x_.defined(); ++i)
      if (wants_weight(i, grads)) unpacked_x_ = x.unpack();
  }

 private:
  bool wants_weight(size_t i, const variable_list& grads) const {
    return grads[i].defined() && task_should_compute_output(i + 1);
  }
  at::Tensor unpacked_x_;  // during a backward
};

/// Null when nothing requires a gradient.
template <class NodeType>
std::shared_ptr<NodeType> make_joint_node(const at::Tensor& x, const std::vector<SinkedWeight>& weights,
                                          const std::shared_ptr<const Products>& products) {
  const bool any = compute_requires_grad(x) ||
                   std::any_of(weights.begin(), weights.end(),
                               [](const SinkedWeight& each) { return compute_requires_grad(each.weight); });
  if (!any) return nullptr;
  auto node = std::shared_ptr<NodeType>(new NodeType(), torch::autograd::deleteNode);
  torch::autograd::edge_list edges = torch::autograd::collect_next_edges(x);
  for (const SinkedWeight& each : weights) {
    edges.push_back(torch::autograd::collect_next_edges(each.weight)[0]);
    node->weights.push_back(x.requires_grad() ? save_input(each.weight) : SavedVariable());
    node->sinks.push_back(each.sink);
  }
  node->set_next_edges(std::move(edges));
  node->products = products;
  return node;
}

inline bool any_requires_grad(const std::vector<SinkedWeight>& weights) {
  return std::any_of(weights.begin(), weights.end(),
                     [](const SinkedWeight& each) { return compute_requires_grad(each.weight); });
}

}  // namespace titan::ops

#pragma once

// One input of several layers: what is cast of it in a forward, and what is kept for the backward.

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "ops/autograd_node.h"
#include "titan/ops/linear.h"

namespace titan::ops {

/// [Note: an input of several layers]
/// Layers whose products join share the scale and each cast of their input. For the backward the one form is
/// kept that their weights' gradients multiply. Where layers don't join (one stays in high precision, or each
/// has a delayed scale of its own) a form for each would come to more than the input itself. So the input is
/// kept, once, and of each form the scale, where it has one for the whole; the backward casts again, once for
/// all who share.

using ProductsOfEach = std::vector<std::shared_ptr<const Products>>;

/// In a forward. Rows [N, I] come with each call, as they may be on their way until the first one.
class JointInput {
 public:
  /// `keeps`: of each layer, whether a backward will want its weight's gradient.
  JointInput(const ProductsOfEach& products, const std::vector<bool>& keeps);

  /// Whether one form serves all layers.
  bool alike() const;
  /// For layer i, with the scale that its casts share.
  const Operand& scaled(size_t i, const Operand& rows);
  /// As layer i multiplies it.
  const Operand& cast(size_t i, const Operand& rows);

 private:
  friend class KeptJointInput;
  struct Form {
    bool keeps = false;  // a backward will ask for it
    bool is_cast = false;
    std::optional<Operand> operand;
  };
  const ProductsOfEach& products_;
  std::vector<size_t> leaders_;  // for each layer the first one whose casts are its too
  std::vector<Form> forms_;      // of leaders
  bool trains_;
};

/// Between forward and backward, and in the latter.
class KeptJointInput {
 public:
  /// `x`: what autograd knows of the rows; undefined where they are the operation's own.
  void save(const at::Tensor& x, const Operand& rows, JointInput& input);
  void reset_data();

  /// All that was saved, at once: with checkpointing this may run the layer again. Then of(), until
  /// forget_unpacked().
  void unpack();
  /// As the gradient of layer i's weight multiplies it.
  const Operand& of(size_t i, const ProductsOfEach& products);
  void forget_unpacked();

 private:
  struct Unpacked {
    Operand rows;
    std::vector<at::Tensor> scales;
    std::vector<std::optional<Operand>> forms;  // of leaders
  };
  std::vector<size_t> leaders_;
  SavedInput saved_;
  std::vector<SavedVariable> scales_;  // of leaders, where the input itself is kept for several
  std::optional<Unpacked> unpacked_;
};

// What nodes of several linear layers over one input share.

/// Hands a weight's gradient to its sink, or returns it. A sink may put it off, so it gets what the product
/// reads and no more.
inline at::Tensor weight_gradient(const std::shared_ptr<const Products>& products,
                                  const std::shared_ptr<GradSink>& sink, Operand grad_NO,
                                  const Operand& x_NI) {
  if (!sink) return products->grad_weight(grad_NO, x_NI);
  if (grad_NO.down_columns.defined() || grad_NO.values.defined()) grad_NO.along_rows = {};
  sink->accept(WeightGrad{products, std::move(grad_NO), products->kept(x_NI)});
  return {};
}

/// The weight of a backward's product: from its source, or what the forward saved.
inline Operand unpacked(const SavedVariable& weight, const std::shared_ptr<const WeightSource>& source) {
  return source ? source->weight() : Operand(weight.unpack());
}
inline Operand operand_of(const SinkedWeight& weight) {
  return weight.source ? weight.source->weight() : Operand(weight.weight);
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

  KeptJointInput x;  // what the products multiplied
  std::vector<SavedVariable> weights;
  std::vector<std::shared_ptr<const WeightSource>> sources;
  std::vector<std::shared_ptr<GradSink>> sinks;
  ProductsOfEach products;

 protected:
  virtual void backward(const variable_list& grads, variable_list& results) = 0;

  /// Of the outputs; without products where there is none.
  std::vector<Operand> grad_operands(const variable_list& grads) {
    std::vector<Operand> operands(weights.size());
    for (size_t i = 0; i < weights.size(); ++i)
      if (grads[i].defined()) operands[i] = grad_operand(grads, i);
    return operands;
  }
  Operand grad_operand(const variable_list& grads, size_t i) {
    return products[i]->grad(as_rows(grads[i]), task_should_compute_output(0),
                             task_should_compute_output(i + 1));
  }
  Operand weight(size_t i) const { return unpacked(weights[i], sources[i]); }

  /// Both products of one output after the other, so that one output's casts are there at a time. Returns
  /// x's gradient [N, I] where it is wanted; the weights' go into results[1...].
  at::Tensor both_gradients(const variable_list& grads, variable_list& results) {
    unpack_x(grads);
    at::Tensor sum;
    for (size_t i = 0; i < weights.size(); ++i) {
      if (!grads[i].defined()) continue;
      const Operand operand = grad_operand(grads, i);
      if (task_should_compute_output(0))
        sum = sum.defined() ? products[i]->add_grad_input(sum, operand, weight(i))
                            : products[i]->grad_input(operand, weight(i));
      if (wants_weight(i, grads))
        results[i + 1] = weight_gradient(products[i], sinks[i], operand, x.of(i, products));
    }
    x.forget_unpacked();
    return sum;
  }
  /// Into results[1...].
  void weight_gradients(const variable_list& grads, const std::vector<Operand>& operands,
                        variable_list& results) {
    unpack_x(grads);
    for (size_t i = 0; i < weights.size(); ++i)
      if (wants_weight(i, grads))
        results[i + 1] = weight_gradient(products[i], sinks[i], operands[i], x.of(i, products));
    x.forget_unpacked();
  }
  void unpack_x(const variable_list& grads) {
    for (size_t i = 0; i < weights.size(); ++i)
      if (wants_weight(i, grads)) x.unpack();
  }

 private:
  bool wants_weight(size_t i, const variable_list& grads) const {
    return grads[i].defined() && task_should_compute_output(i + 1);
  }
};

/// Null when nothing requires a gradient.
template <class NodeType>
std::shared_ptr<NodeType> make_joint_node(const at::Tensor& x, const std::vector<SinkedWeight>& weights,
                                          ProductsOfEach products) {
  const bool any = compute_requires_grad(x) ||
                   std::any_of(weights.begin(), weights.end(),
                               [](const SinkedWeight& each) { return compute_requires_grad(each.weight); });
  if (!any) return nullptr;
  auto node = std::shared_ptr<NodeType>(new NodeType(), torch::autograd::deleteNode);
  torch::autograd::edge_list edges = torch::autograd::collect_next_edges(x);
  for (const SinkedWeight& each : weights) {
    edges.push_back(torch::autograd::collect_next_edges(each.weight)[0]);
    node->weights.push_back(x.requires_grad() && !each.source ? save_input(each.weight) : SavedVariable());
    node->sources.push_back(each.source);
    node->sinks.push_back(each.sink);
  }
  node->set_next_edges(std::move(edges));
  node->products = std::move(products);
  return node;
}

/// Of each weight whether a backward through `node` (null: there is none) will want its gradient.
inline std::vector<bool> keeps_of(const std::shared_ptr<JointNode>& node,
                                  const std::vector<SinkedWeight>& weights) {
  std::vector<bool> keeps;
  for (const SinkedWeight& each : weights) keeps.push_back(node && compute_requires_grad(each.weight));
  return keeps;
}
inline bool keeps_any(const std::vector<bool>& keeps) {
  return std::find(keeps.begin(), keeps.end(), true) != keeps.end();
}

}  // namespace titan::ops

#pragma once

// Base of linear layers' nodes: an input that several layers may share, in the forward and kept for the
// backward, and the backward itself.

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "ops/autograd_node.h"
#include "titan/ops/linear.h"

namespace titan::ops {

using ProductsOfEach = std::vector<SharedProducts>;

/// [Note: an input of several layers]
/// Layers whose products join share the scale and each cast of their input. For the backward, only the form
/// that their weights' gradients multiply is kept. If layers don't join (one stays in high precision, or each
/// has its own delayed scale), a form for each would take more memory than the input itself. So the input is
/// kept once, with the scale of each form that has one scale for the whole matrix. The backward casts again,
/// once for all layers that share the cast.

/// The input in a forward. Its rows [N, I] are passed in each call, because some may arrive later.
class JointInput {
 public:
  /// `keeps`: for each layer, whether a backward will need its weight's gradient. `recomputed`: the backward
  /// won't find the input kept, but computed again.
  JointInput(const ProductsOfEach& products, const std::vector<bool>& keeps, bool recomputed);

  /// Whether one form serves all layers.
  bool alike() const;
  /// The input for layer i, with the scale that its casts share.
  const Operand& scaled(size_t i, const Operand& rows);
  /// The input in the form that layer i multiplies.
  const Operand& cast(size_t i, const Operand& rows);

 private:
  friend class KeptJointInput;
  struct Form {
    bool keeps = false;    // a backward will need it
    bool is_kept = false;  // in the form that the weights' gradients multiply
    bool is_cast = false;
    std::optional<Operand> operand;
  };
  const ProductsOfEach& products_;
  std::vector<size_t> leaders_;  // for each layer, the first one whose casts it shares
  std::vector<Form> forms_;      // used only for leaders
  bool trains_;
};

/// The input between forward and backward, and in the backward.
class KeptJointInput {
 public:
  /// `x`: the rows as autograd's tensor; undefined if the operation computed the rows itself.
  void save(const at::Tensor& x, const Operand& rows, JointInput& input);
  void reset_data();

  /// Unpacks all saved tensors together, because with checkpointing this may run the layer again.
  /// grad: as in SavedInput::unpack.
  void unpack(const at::Tensor& grad = {});
  /// The form that the gradient of layer i's weight multiplies. Call it between unpack() and
  /// forget_unpacked().
  const Operand& of(size_t i, const ProductsOfEach& products);
  void forget_unpacked() { unpacked_.reset(); }

 private:
  struct Unpacked {
    Operand rows;
    std::vector<at::Tensor> scales;
    std::vector<std::optional<Operand>> forms;  // used only for leaders
  };
  std::vector<size_t> leaders_;
  SavedInput saved_;
  std::vector<SavedVariable> scales_;  // used only for leaders, if the input itself is kept for several
  std::optional<Unpacked> unpacked_;
};

/// Passes a weight's gradient to its sink, or returns it if there is none. A sink may defer it, so it gets
/// only the operands that the product reads.
inline at::Tensor weight_gradient(const SharedProducts& products, const std::shared_ptr<GradSink>& sink,
                                  Operand grad_NO, const Operand& x_NI) {
  if (!sink) return products->grad_weight(grad_NO, x_NI);
  if (grad_NO.down_columns.defined() || grad_NO.values.defined()) grad_NO.along_rows = {};
  sink->accept(WeightGrad{products, std::move(grad_NO), products->kept(x_NI)});
  return {};
}

/// The weight of a product, from its source or the tensor itself.
inline Operand operand_of(const SinkedWeight& weight) {
  return weight.source ? weight.source->weight() : Operand(weight.weight);
}

/// The weights of a forward, in the order of its products. All are cast at first, unless activation checkpointing may hand
/// back the results of some products.
class ForwardWeights {
 public:
  /// Both outlive this.
  ForwardWeights(const std::vector<SinkedWeight>& weights, const ProductsOfEach& products);
  /// Call it once for each.
  Operand take(size_t i);

 private:
  const std::vector<SinkedWeight>& weights_;
  std::vector<Operand> operands_;  // empty: they are cast one by one
};

/// The weight between forward and backward.
struct SavedWeight {
  SavedVariable saved;
  std::shared_ptr<const WeightSource> source;
  std::shared_ptr<GradSink> sink;

  SavedWeight() = default;
  SavedWeight(const SinkedWeight& weight, bool is_read) : source(weight.source), sink(weight.sink) {
    if (is_read && !source) saved = save_input(weight.weight);
  }
  Operand unpack() const { return source ? source->weight() : Operand(saved.unpack()); }
};

/// [Note: weights of several layers] On a GPU, one launch casts all weights of a node. The first product then runs beside
/// the casts of all, but each cast is freed after its product, and outputs and sums are allocated meanwhile, so the
/// peak of memory is later.
inline void cast_weights(at::ArrayRef<const Products*> products, std::vector<Operand>& weights, Pass pass) {
  BelowAutograd guard;
  if (weights.size() > 1) products[0]->cast_weights(products, weights, pass);
}

/// The backward of linear layers over one input. Inputs: x, then the weights. The engine waits for the
/// gradients of all outputs that have one.
class JointNode : public torch::autograd::Node {
 public:
  variable_list apply(variable_list&& grads) final {
    refuse_second_derivative(*this);
    variable_list results(num_outputs());
    if (std::any_of(grads.begin(), grads.end(), [](const at::Tensor& g) { return g.defined(); }))
      backward(grads, results);
    return results;
  }
  void release_variables() override {
    x.reset_data();
    for (SavedWeight& weight : weights) weight.saved.reset_data();
  }

  KeptJointInput x;
  std::vector<SavedWeight> weights;
  ProductsOfEach products;

 protected:
  virtual void backward(const variable_list& grads, variable_list& results) = 0;

  /// The weights of the layers whose outputs have gradients, cast for the products with those.
  std::vector<Operand> weights_of(const variable_list& grads) const {
    std::vector<Operand> read;
    std::vector<const Products*> readers;
    for (size_t i = 0; i < weights.size(); ++i) {
      if (!grads[i].defined()) continue;
      read.push_back(weights[i].unpack());
      readers.push_back(products[i].get());
    }
    cast_weights(readers, read, Pass::Backward);
    return read;
  }

  Operand grad_operand(const variable_list& grads, size_t i) {
    return products[i]->grad(as_rows(grads[i]), task_should_compute_output(0),
                             task_should_compute_output(i + 1));
  }
  bool wants_weight(size_t i, const variable_list& grads) const {
    return grads[i].defined() && task_should_compute_output(i + 1);
  }
  void unpack_x(const variable_list& grads) {
    for (size_t i = 0; i < weights.size(); ++i)
      if (wants_weight(i, grads)) x.unpack();
  }
  /// Puts the gradient of layer i's weight into results[i + 1].
  void add_weight_gradient(size_t i, const Operand& grad, variable_list& results) {
    x.unpack();
    results[i + 1] = weight_gradient(products[i], weights[i].sink, grad, x.of(i, products));
  }

  /// Computes both products of one output after the other, so that only one output's casts exist at a time.
  /// Returns x's gradient [N, I] if it is needed; the weights' gradients go into results[1...]. x_sizes: x's, if results[0] is to
  /// be its gradient; a single layer then gets it before its weight's, so that the node that made x can use it.
  at::Tensor both_gradients(const variable_list& grads, variable_list& results,
                            at::OptionalIntArrayRef x_sizes = std::nullopt) {
    at::Tensor sum;
    std::vector<Operand> read = task_should_compute_output(0) ? weights_of(grads) : std::vector<Operand>();
    size_t num_read = 0;
    for (size_t i = 0; i < weights.size(); ++i) {
      if (!grads[i].defined()) continue;
      const Operand grad = grad_operand(grads, i);
      if (task_should_compute_output(0)) {
        const Operand weight = std::exchange(read[num_read++], {});
        sum = sum.defined() ? products[i]->add_grad_input(sum, grad, weight)
                            : products[i]->grad_input(grad, weight);
      }
      if (x_sizes && sum.defined() && weights.size() == 1) {
        results[0] = sum.view(*x_sizes);
        if (wants_weight(i, grads)) x.unpack(results[0]);
      }
      if (wants_weight(i, grads)) add_weight_gradient(i, grad, results);
    }
    x.forget_unpacked();
    if (x_sizes && sum.defined() && !results[0].defined()) results[0] = sum.view(*x_sizes);
    return sum;
  }
};

/// Null if nothing requires a gradient. `bias` is one more input, or undefined.
template <class NodeType>
std::shared_ptr<NodeType> make_joint_node(const at::Tensor& x, const std::vector<SinkedWeight>& weights,
                                          const ProductsOfEach& products, const at::Tensor& bias = {}) {
  const bool any = compute_requires_grad(x, bias) ||
                   std::any_of(weights.begin(), weights.end(),
                               [](const SinkedWeight& each) { return compute_requires_grad(each.weight); });
  if (!any) return nullptr;
  auto node = std::shared_ptr<NodeType>(new NodeType(), torch::autograd::deleteNode);
  torch::autograd::edge_list edges = torch::autograd::collect_next_edges(x);
  for (const SinkedWeight& each : weights) {
    edges.push_back(torch::autograd::collect_next_edges(each.weight)[0]);
    node->weights.emplace_back(each, x.requires_grad());
  }
  if (bias.defined()) edges.push_back(torch::autograd::collect_next_edges(bias)[0]);
  node->set_next_edges(std::move(edges));
  node->products = products;
  return node;
}

/// For each weight, whether a backward through `node` (null: no backward) will need its gradient.
inline std::vector<bool> keeps_of(const std::shared_ptr<JointNode>& node,
                                  const std::vector<SinkedWeight>& weights) {
  std::vector<bool> keeps;
  for (const SinkedWeight& each : weights) keeps.push_back(node && compute_requires_grad(each.weight));
  return keeps;
}
inline bool any_of(const std::vector<bool>& flags) {
  return std::find(flags.begin(), flags.end(), true) != flags.end();
}

/// Sizes of an output of `features` features for an input of these sizes.
inline std::vector<int64_t> with_features(at::IntArrayRef sizes, int64_t features) {
  std::vector<int64_t> result = sizes.vec();
  result.back() = features;
  return result;
}

/// `num_dims`: number of dimensions of x; 0: any number.
inline void check_linear_shapes(const char* op, const at::Tensor& x, const at::Tensor& weight,
                                int64_t num_dims = 0) {
  TITAN_CHECK(weight.dim() == 2 && x.dim() >= 1 && (num_dims == 0 || x.dim() == num_dims) &&
                  x.size(-1) == weight.size(1),
              op, ": x ", x.sizes(), " doesn't fit weight ", weight.sizes(), "; expected ",
              num_dims == 3 ? "[batch, sequence, in]" : "[..., in]", " and [out, in]");
  TITAN_CHECK(x.scalar_type() == weight.scalar_type(), op, ": x is ", x.scalar_type(), ", the weight ",
              weight.scalar_type());
}

}  // namespace titan::ops

#include "titan/ops/overlapped_linear.h"

#include <ATen/ops/empty.h>

#include "ops/joint_node.h"
#include "ops/saved_input.h"
#include "titan/ops/saved_outputs.h"

namespace titan::ops {

namespace {

using Sizes = std::vector<int64_t>;

// The part of [B, S, F] that is rank r's: not contiguous unless B is 1.
at::Tensor part_of_sequence(const at::Tensor& whole, int rank, int count) {
  const int64_t length = whole.size(1) / count;
  return whole.narrow(1, rank * length, length);
}

at::Tensor product(const Products& products, const at::Tensor& x, const at::Tensor& weight, bool transposed) {
  const at::Tensor rows = as_rows(x);
  Sizes sizes = x.sizes().vec();
  sizes.back() = weight.size(transposed ? 1 : 0);
  return (transposed ? products.grad_input(rows, weight) : products.forward(rows, weight)).view(sizes);
}

// A gather that products pull parts out of. The first product takes them as they come; later ones find the
// sequence whole.
class PulledGather {
 public:
  PulledGather(const SequenceExchange& exchange, const at::Tensor& part, const char* module)
      : gather_(exchange.gather(part.contiguous(), module)),
        count_(exchange.count()),
        sizes_(part.sizes().vec()) {
    sizes_[1] *= count_;
    whole_ = at::empty(sizes_, part.options());
  }

  // x W^T, or g W if `transposed`.
  at::Tensor multiply(const Products& products, const at::Tensor& weight, bool transposed) {
    if (complete_) return product(products, whole_, weight, transposed);
    Sizes sizes = sizes_;
    sizes.back() = weight.size(transposed ? 1 : 0);
    at::Tensor result = at::empty(sizes, whole_.options());
    take_parts([&](int rank, const at::Tensor& part) {
      part_of_sequence(result, rank, count_).copy_(product(products, part, weight, transposed));
    });
    return result;
  }
  const at::Tensor& whole() {
    if (!complete_) take_parts([](int, const at::Tensor&) {});
    return whole_;
  }

 private:
  template <class Use>
  void take_parts(const Use& use) {
    for (int rank = gather_->next(); rank >= 0; rank = gather_->next()) {
      const at::Tensor part = gather_->part(rank);
      use(rank, part);
      part_of_sequence(whole_, rank, count_).copy_(part);
    }
    complete_ = true;
    gather_.reset();
  }

  std::unique_ptr<SequenceExchange::Gather> gather_;
  int count_;
  Sizes sizes_;
  at::Tensor whole_;
  bool complete_ = false;
};

// The sum over pairs of a product, scattered. `meanwhile` runs when all is on its way.
template <class Meanwhile>
at::Tensor multiply_and_scatter(const SequenceExchange& exchange, const char* module,
                                const Products& products, const std::vector<at::Tensor>& inputs,
                                const std::vector<at::Tensor>& weights, bool transposed,
                                const Meanwhile& meanwhile) {
  const auto scatter = exchange.scatter(module);
  for (int rank = scatter->next(); rank >= 0; rank = scatter->next()) {
    at::Tensor summand;
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!inputs[i].defined()) continue;
      const at::Tensor one =
          product(products, part_of_sequence(inputs[i], rank, exchange.count()), weights[i], transposed);
      summand = summand.defined() ? summand.add_(one) : one;
    }
    scatter->give(summand);
  }
  meanwhile();
  return scatter->finish();
}

void check_sequence(const at::Tensor& x, const at::Tensor& weight, const char* what) {
  TITAN_CHECK(x.dim() == 3 && weight.dim() == 2 && x.size(2) == weight.size(1), what, ": x ", x.sizes(),
              " doesn't fit weight ", weight.sizes(), "; expected [batch, sequence, in] and [out, in]");
  TITAN_CHECK(x.scalar_type() == weight.scalar_type(), what, ": x is ", x.scalar_type(), ", the weight ",
              weight.scalar_type());
}

struct GatheredLinearsBackward final : JointNode {
  std::shared_ptr<const SequenceExchange> exchange;
  const char* module = "";

  void backward(const variable_list& grads, variable_list& results) override {
    if (!task_should_compute_output(0)) return weight_gradients(grads, results);
    std::vector<at::Tensor> unpacked;
    for (const SavedVariable& weight : weights) unpacked.push_back(weight.unpack());
    unpack_x(grads);  // before anything is on its way: with checkpointing this may run the layer again
    results[0] = multiply_and_scatter(*exchange, module, *products, grads, unpacked, /*transposed=*/true,
                                      [&] { weight_gradients(grads, results); });
  }
  std::string name() const override { return "titan::gathered_linears backward"; }
};

struct ScatteredLinearBackward final : BackwardNode {
  enum Input : size_t { X, Weight };
  SavedInput x;
  SavedVariable weight;
  std::shared_ptr<GradSink> sink;
  std::shared_ptr<const Products> products;
  std::shared_ptr<const SequenceExchange> exchange;
  const char* module = "";

  variable_list backward(const at::Tensor& grad) override {
    variable_list results(2);
    // First: with checkpointing this may run the layer again, whose exchanges have to be over before this
    // one.
    const at::Tensor weight_OI = task_should_compute_output(X) ? weight.unpack() : at::Tensor();
    const at::Tensor x_BSI = task_should_compute_output(Weight) ? x.unpack() : at::Tensor();
    PulledGather gradient(*exchange, grad, module);
    if (weight_OI.defined()) results[X] = gradient.multiply(*products, weight_OI, /*transposed=*/true);
    if (x_BSI.defined()) results[Weight] = weight_gradient(products, sink, gradient.whole(), x_BSI);
    gradient.whole();  // what the peers sent has to be received
    return results;
  }
  void release_variables() override {
    x.reset_data();
    weight.reset_data();
  }
  std::string name() const override { return "titan::scattered_linear backward"; }
};

}  // namespace

std::vector<at::Tensor> gathered_linears(const at::Tensor& x, const std::vector<SinkedWeight>& weights,
                                         const std::shared_ptr<const Products>& products,
                                         const std::shared_ptr<const SequenceExchange>& exchange,
                                         const char* module) {
  for (const SinkedWeight& each : weights) check_sequence(x, each.weight, "gathered_linears");
  const auto node = make_joint_node<GatheredLinearsBackward>(x, weights, products);
  if (node) {
    node->exchange = exchange;
    node->module = module;
  }
  std::vector<at::Tensor> outputs;
  at::Tensor whole_x;
  {
    BelowAutograd guard;
    PulledGather gather(*exchange, x, module);
    for (const SinkedWeight& each : weights)
      outputs.push_back(kept(KeptKind::Product, each.weight,
                             [&] { return gather.multiply(*products, each.weight, /*transposed=*/false); }));
    whole_x = gather.whole();  // also where nobody needs it: what the peers sent has to be received
  }
  if (node && any_requires_grad(weights)) node->x = save_input(whole_x);
  if (node)
    for (at::Tensor& output : outputs) torch::autograd::set_history(output, node);
  return outputs;
}

at::Tensor scattered_linear(const at::Tensor& x, const SinkedWeight& weight,
                            const std::shared_ptr<const Products>& products,
                            const std::shared_ptr<const SequenceExchange>& exchange, const char* module) {
  check_sequence(x, weight.weight, "scattered_linear");
  TITAN_CHECK(x.size(1) % exchange->count() == 0, "scattered_linear: a sequence of ", x.size(1),
              " can't be cut into ", exchange->count(), " equal parts");
  std::shared_ptr<ScatteredLinearBackward> node;
  if (compute_requires_grad(x, weight.weight)) {
    node = make_node<ScatteredLinearBackward>(x, weight.weight);
    if (weight.weight.requires_grad()) node->x = SavedInput(x);
    if (x.requires_grad()) node->weight = save_input(weight.weight);
    node->sink = weight.sink;
    node->products = products;
    node->exchange = exchange;
    node->module = module;
  }
  const at::Tensor y = kept(KeptKind::ReduceScatter, weight.weight, [&] {
    BelowAutograd guard;
    return multiply_and_scatter(*exchange, module, *products, {x}, {weight.weight}, /*transposed=*/false,
                                [] {});
  });
  if (node) set_history(y, node);
  return y;
}

}  // namespace titan::ops

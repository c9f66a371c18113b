#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "ops/joint_node.h"
#include "ops/saved_outputs.h"
#include "titan/core/error.h"
#include "titan/ops/linear.h"
#include "titan/ops/products.h"

namespace titan::ops {

at::Tensor SequenceExchange::gather_whole(const at::Tensor& /*part*/) const {
  TITAN_INTERNAL_ASSERT(false, "an exchange of parts was asked for the whole");
  return {};
}

at::Tensor SequenceExchange::scatter_whole(const at::Tensor& /*summand*/) const {
  TITAN_INTERNAL_ASSERT(false, "an exchange of parts was asked for the whole");
  return {};
}

// An operand of which each rank has some rows, on its way to being whole: what overlapped products pull parts
// out of.

/// The part of [B, S, F] that is rank r's: not contiguous unless B is 1.
at::Tensor part_of_sequence(const at::Tensor& whole, int rank, int count);
/// The same of an operand of rows [B * S, F].
Operand part_of_sequence(const Operand& whole, int64_t batch, int rank, int count);

/// One product of a pass, of rows.
at::Tensor product(const Products& products, Pass pass, const Operand& rows, const Operand& weight);

class PulledGather {
 public:
  /// part: [B, S/N, F]; `rows`: the same as Products::part made it. With a scale for the whole the cast
  /// travels in place of the values.
  PulledGather(const SequenceExchange& exchange, const Operand& rows, const at::Tensor& part);

  /// Whether parts are still to come, and these products may take them one by one.
  bool multiplies_parts(const Products& products, Pass pass) const {
    return gather_ && (scale_.defined() || products.multiplies_rows_apart(pass));
  }
  /// [B, S, features]: each part by `weight` when it is there.
  at::Tensor multiply_parts(const Products& products, Pass pass, const Operand& weight, int64_t features);
  /// Rows [B * S, F], when all have come.
  const Operand& whole();
  bool complete() const { return !gather_; }

 private:
  template <class Use>
  void take_parts(const Use& use);
  Operand operand_of(const at::Tensor& travelled) const;

  int count_;
  std::vector<int64_t> sizes_;  // of the whole
  at::ScalarType dtype_, travels_as_;
  at::Tensor scale_;  // undefined: the values travel
  std::unique_ptr<SequenceExchange::Gather> gather_;
  at::Tensor arrived_;  // [B, S, F], while parts are on their way
  Operand whole_;
};

namespace {

// Not every operation and not every backend knows 8-bit floating-point numbers.
at::Tensor as_bytes(const at::Tensor& tensor) {
  return tensor.element_size() == 1 ? tensor.view(at::kByte) : tensor;
}

// Of rows [B * S, F].
at::Tensor rows_of_part(const at::Tensor& rows, int64_t batch, int rank, int count) {
  if (!rows.defined()) return {};
  const at::Tensor whole = as_bytes(rows.contiguous()).view({batch, rows.size(0) / batch, rows.size(1)});
  return as_rows(part_of_sequence(whole, rank, count)).view(rows.scalar_type());
}

}  // namespace

at::Tensor part_of_sequence(const at::Tensor& whole, int rank, int count) {
  const int64_t length = whole.size(1) / count;
  return whole.narrow(1, rank * length, length);
}

Operand part_of_sequence(const Operand& whole, int64_t batch, int rank, int count) {
  Operand part;
  part.dtype = whole.dtype;
  part.values = rows_of_part(whole.values, batch, rank, count);
  if (!whole.along_rows.defined()) return part;
  const at::Tensor& scale = whole.along_rows.scale;
  part.along_rows = {rows_of_part(whole.along_rows.data, batch, rank, count),
                     scale.dim() == 0 ? scale : rows_of_part(scale, batch, rank, count)};
  return part;
}

at::Tensor product(const Products& products, Pass pass, const Operand& rows, const Operand& weight) {
  return pass == Pass::Forward ? products.forward(rows, weight) : products.grad_input(rows, weight);
}

PulledGather::PulledGather(const SequenceExchange& exchange, const Operand& rows, const at::Tensor& part)
    : count_(exchange.count()), sizes_(part.sizes().vec()), dtype_(rows.dtype), travels_as_(rows.dtype) {
  at::Tensor travelling = rows.values;
  if (rows.along_rows.defined()) {
    scale_ = rows.along_rows.scale;
    travels_as_ = rows.along_rows.data.scalar_type();
    travelling = as_bytes(rows.along_rows.data);
  }
  travelling = travelling.contiguous().view(sizes_);
  sizes_[1] *= count_;
  if (exchange.at_once()) {
    whole_ = operand_of(exchange.gather_whole(travelling));
    return;
  }
  gather_ = exchange.gather(travelling);
  arrived_ = at::empty(sizes_, travelling.options());
}

Operand PulledGather::operand_of(const at::Tensor& travelled) const {
  const at::Tensor rows = as_rows(travelled);
  if (!scale_.defined()) return rows;
  Operand operand;
  operand.dtype = dtype_;
  operand.along_rows = {rows.view(travels_as_), scale_};
  return operand;
}

template <class Use>
void PulledGather::take_parts(const Use& use) {
  for (int rank = gather_->next(); rank >= 0; rank = gather_->next()) {
    const at::Tensor part = gather_->part(rank);
    use(rank, part);
    part_of_sequence(arrived_, rank, count_).copy_(part);
  }
  gather_.reset();
  whole_ = operand_of(arrived_);
  arrived_ = at::Tensor();
}

at::Tensor PulledGather::multiply_parts(const Products& products, Pass pass, const Operand& weight,
                                        int64_t features) {
  std::vector<int64_t> sizes = sizes_;
  sizes.back() = features;
  const auto device = (scale_.defined() ? scale_ : arrived_).options();
  at::Tensor result = at::empty(sizes, device.dtype(dtype_));
  const Operand prepared = products.weight(weight, pass);
  take_parts([&](int rank, const at::Tensor& part) {
    const at::Tensor place = part_of_sequence(result, rank, count_);
    place.copy_(product(products, pass, operand_of(part), prepared).view(place.sizes()));
  });
  return result;
}

const Operand& PulledGather::whole() {
  if (gather_) take_parts([](int, const at::Tensor&) {});
  return whole_;
}

namespace {

using Sizes = std::vector<int64_t>;

Sizes with_features(at::IntArrayRef sizes, int64_t features) {
  Sizes result = sizes.vec();
  result.back() = features;
  return result;
}

struct Summand {
  const Products* products;
  Operand rows;  // [B * S, F]
  Operand weight;
};

// The sum over ranks of the sum of products, scattered. `meanwhile` runs when all is on its way.
template <class Meanwhile>
at::Tensor multiply_and_scatter(const SequenceExchange& exchange, Pass pass, std::vector<Summand> summands,
                                const Sizes& sizes, const Meanwhile& meanwhile) {
  for (Summand& each : summands) each.weight = each.products->weight(each.weight, pass);
  Sizes part_sizes = sizes;
  part_sizes[1] /= exchange.count();
  const auto scatter = exchange.scatter();
  for (int rank = scatter->next(); rank >= 0; rank = scatter->next()) {
    at::Tensor sum;
    for (const Summand& each : summands) {
      const Operand part = part_of_sequence(each.rows, sizes[0], rank, exchange.count());
      const at::Tensor one = product(*each.products, pass, part, each.weight);
      sum = sum.defined() ? sum.add_(one) : one;
    }
    scatter->give(sum.view(part_sizes));
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
  Sizes whole_sizes;  // of x

  void backward(const variable_list& grads, variable_list& results) override {
    const bool wants_x = task_should_compute_output(0);
    if (!wants_x || exchange->at_once()) {
      const at::Tensor grad_x = both_gradients(grads, results);
      if (wants_x) results[0] = exchange->scatter_whole(grad_x.view(whole_sizes));
      return;
    }
    unpack_x(grads);  // before anything is on its way: with checkpointing this may run the layer again
    const std::vector<Operand> operands = grad_operands(grads);
    std::vector<Summand> summands;
    for (size_t i = 0; i < weights.size(); ++i)
      if (grads[i].defined()) summands.push_back({products[i].get(), operands[i], weight(i)});
    results[0] = multiply_and_scatter(*exchange, Pass::Backward, std::move(summands), whole_sizes,
                                      [&] { weight_gradients(grads, operands, results); });
  }
  std::string name() const override { return "titan::gathered_linears backward"; }
};

struct ScatteredLinearBackward final : BackwardNode {
  enum Input : size_t { X, Weight };
  SavedInput x;
  SavedVariable weight;
  SinkedWeight sinked;  // without the weight
  int64_t features = 0;
  std::shared_ptr<const Products> products;
  std::shared_ptr<const SequenceExchange> exchange;

  variable_list backward(const at::Tensor& grad) override {
    variable_list results(2);
    const bool wants_x = task_should_compute_output(X), wants_weight = task_should_compute_output(Weight);
    // First: with checkpointing this may run the layer again, whose exchanges have to be over before this
    // one.
    const Operand weight_OI = wants_x ? unpacked(weight, sinked.source) : Operand();
    const Operand x_NI = wants_weight ? as_rows(x.unpack()) : Operand();
    PulledGather gather(*exchange, products->part(as_rows(grad), Pass::Backward, /*trains=*/true), grad);
    const bool by_parts = wants_x && gather.multiplies_parts(*products, Pass::Backward);
    if (by_parts) results[X] = gather.multiply_parts(*products, Pass::Backward, weight_OI, features);
    // In any case: what the peers sent has to be received.
    const Operand whole = products->grad(gather.whole(), wants_x && !by_parts, wants_weight);
    if (wants_x && !by_parts) {
      Sizes sizes = with_features(grad.sizes(), features);
      sizes[1] *= exchange->count();
      results[X] = products->grad_input(whole, weight_OI).view(sizes);
    }
    if (wants_weight) results[Weight] = weight_gradient(products, sinked.sink, whole, x_NI);
    return results;
  }
  void release_variables() override {
    x.reset_data();
    weight.reset_data();
  }
  std::string name() const override { return "titan::scattered_linear backward"; }
};

// The products of layers over one gathered input.
class GatheredProducts {
 public:
  GatheredProducts(const at::Tensor& x, const ProductsOfEach& products, const std::vector<bool>& keeps,
                   const SequenceExchange& exchange)
      : products_(products),
        input_(products, keeps),
        gather_(exchange,
                input_.alike() ? products[0]->part(as_rows(x), Pass::Forward, at::GradMode::is_enabled())
                               : Operand(as_rows(x)),
                x) {}

  at::Tensor output(size_t i, const SinkedWeight& weight, const Sizes& sizes) {
    if (gather_.multiplies_parts(*products_[i], Pass::Forward))
      return gather_.multiply_parts(*products_[i], Pass::Forward, operand_of(weight), sizes.back());
    return products_[i]->forward(input_.cast(i, gather_.whole()), operand_of(weight)).view(sizes);
  }
  bool complete() const { return gather_.complete(); }
  /// For the backward.
  void save(KeptJointInput& x) { x.save({}, gather_.whole(), input_); }
  /// What the peers sent has to be received, whoever needs it.
  void finish() { gather_.whole(); }

 private:
  const ProductsOfEach& products_;
  JointInput input_;
  PulledGather gather_;
};

}  // namespace

std::vector<at::Tensor> gathered_linears(const at::Tensor& x, const std::vector<SinkedWeight>& weights,
                                         const ProductsOfEach& products,
                                         const std::shared_ptr<const SequenceExchange>& exchange) {
  for (const SinkedWeight& each : weights) check_sequence(x, each.weight, "gathered_linears");
  const auto node = make_joint_node<GatheredLinearsBackward>(x, weights, products);
  Sizes sizes = x.sizes().vec();
  sizes[1] *= exchange->count();
  if (node) {
    node->exchange = exchange;
    node->whole_sizes = sizes;
  }
  const auto below_autograd = [](const auto& run) {
    BelowAutograd guard;
    return run();
  };
  const std::vector<bool> keeps = keeps_of(node, weights);
  auto gathered = below_autograd([&] { return GatheredProducts(x, products, keeps, *exchange); });
  const auto save = [&] {
    if (keeps_any(keeps)) gathered.save(node->x);
  };
  // Before the products ([Note: kept outputs]), unless it is still on its way.
  const bool here = gathered.complete();
  if (here) save();
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < weights.size(); ++i)
    outputs.push_back(kept(KeptKind::Product, weights[i].weight, [&] {
      BelowAutograd guard;
      return gathered.output(i, weights[i], with_features(sizes, weights[i].weight.size(0)));
    }));
  below_autograd([&] { gathered.finish(); });
  if (!here) save();
  if (node)
    for (at::Tensor& output : outputs) torch::autograd::set_history(output, node);
  return outputs;
}

std::vector<at::Tensor> gathered_linears(const at::Tensor& x, const std::vector<SinkedWeight>& weights,
                                         const std::shared_ptr<const Products>& products,
                                         const std::shared_ptr<const SequenceExchange>& exchange) {
  return gathered_linears(x, weights, ProductsOfEach(weights.size(), products), exchange);
}

at::Tensor scattered_linear(const at::Tensor& x, const SinkedWeight& weight,
                            const std::shared_ptr<const Products>& products,
                            const std::shared_ptr<const SequenceExchange>& exchange) {
  check_sequence(x, weight.weight, "scattered_linear");
  TITAN_CHECK(x.size(1) % exchange->count() == 0, "scattered_linear: a sequence of ", x.size(1),
              " can't be cut into ", exchange->count(), " equal parts");
  const bool trains = at::GradMode::is_enabled(), keeps = compute_requires_grad(weight.weight);
  Operand input;
  {
    BelowAutograd guard;
    input = products->scaled(as_rows(x), trains);
  }
  std::shared_ptr<ScatteredLinearBackward> node;
  if (compute_requires_grad(x, weight.weight)) {
    node = make_node<ScatteredLinearBackward>(x, weight.weight);
    if (keeps) node->x = SavedInput(x, input, *products);
    if (x.requires_grad() && !weight.source) node->weight = save_input(weight.weight);
    node->sinked = {{}, weight.sink, weight.source};
    node->features = weight.weight.size(1);
    node->products = products;
    node->exchange = exchange;
  }
  const Sizes sizes = with_features(x.sizes(), weight.weight.size(0));
  const at::Tensor y = kept(KeptKind::ReduceScatter, weight.weight, [&] {
    BelowAutograd guard;
    const Operand cast = products->input(input, trains);
    if (exchange->at_once())
      return exchange->scatter_whole(products->forward(cast, operand_of(weight)).view(sizes));
    return multiply_and_scatter(*exchange, Pass::Forward, {{products.get(), cast, operand_of(weight)}}, sizes,
                                [] {});
  });
  if (node) set_history(y, node);
  return y;
}

}  // namespace titan::ops

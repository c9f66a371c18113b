// Linear layers whose sequence is split over ranks ([Note: parts of rows] in titan/ops/linear.h). The rows of
// an operand arrive part by part, and products multiply each part as it arrives. Sums are sent the same way.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "ops/joint_node.h"
#include "ops/parts_estimate.h"

namespace titan::ops {

at::Tensor SequenceExchange::gather_whole(const at::Tensor& /*part*/) const {
  TITAN_INTERNAL_ASSERT(false, "an exchange of parts was asked for the whole sequence");
  return {};
}

at::Tensor SequenceExchange::scatter_whole(const at::Tensor& /*summand*/) const {
  TITAN_INTERNAL_ASSERT(false, "an exchange of parts was asked for the whole sequence");
  return {};
}

namespace {

using Sizes = std::vector<int64_t>;

// Some operations and backends don't support 8-bit floating-point numbers.
at::Tensor as_bytes(const at::Tensor& tensor) {
  return tensor.element_size() == 1 ? tensor.view(at::kByte) : tensor;
}

/// Rank r's part of [B, S, F]: not contiguous unless B is 1.
at::Tensor part_of_sequence(const at::Tensor& whole, int rank, int count) {
  const int64_t length = whole.size(1) / count;
  return whole.narrow(1, rank * length, length);
}

// Rank r's part of rows [B * S, F].
at::Tensor rows_of_part(const at::Tensor& rows, int64_t batch, int rank, int count) {
  if (!rows.defined()) return {};
  const at::Tensor whole = as_bytes(rows.contiguous()).view({batch, rows.size(0) / batch, rows.size(1)});
  return as_rows(part_of_sequence(whole, rank, count)).view(rows.scalar_type());
}

// The same for the scales of `matrix`. Of scales in tiles (float8::blocked_layout), whole tiles are cut out; if a part's rows
// end within one, the result is [rows, blocks].
at::Tensor scales_of_part(const ScaledMatrix& matrix, int64_t batch, int rank, int count) {
  if (matrix.scale.dim() != 1) return rows_of_part(matrix.scale, batch, rank, count);
  constexpr int64_t tile_rows = 128, tile_blocks = 4, group_rows = 32, block = 32;
  const int64_t rows = matrix.data.size(0), blocks = matrix.data.size(1) / block;
  const at::Tensor bytes = as_bytes(matrix.scale);
  if (rows % (batch * count * tile_rows) == 0)
    return bytes.view({batch, count, -1}).select(1, rank).reshape(-1).view(matrix.scale.scalar_type());
  const int64_t across = (blocks + tile_blocks - 1) / tile_blocks;
  const at::Tensor in_rows = bytes.view({-1, across, group_rows, tile_rows / group_rows, tile_blocks})
                                 .permute({0, 3, 2, 1, 4})
                                 .reshape({-1, across * tile_blocks});
  return rows_of_part(in_rows.narrow(0, 0, rows).narrow(1, 0, blocks), batch, rank, count)
      .view(matrix.scale.scalar_type());
}

// cuBLAS reads scales of rows from multiples of 16 bytes.
at::Tensor aligned_scales(const at::Tensor& scales) {
  const bool aligned = !scales.defined() || scales.storage_offset() * scales.element_size() % 16 == 0;
  return aligned ? scales : scales.clone();
}

Operand part_of_sequence(const Operand& whole, int64_t batch, int rank, int count) {
  Operand part;
  part.dtype = whole.dtype;
  part.values = rows_of_part(whole.values, batch, rank, count);
  if (!whole.along_rows.defined()) return part;
  const auto& [data, scale, inverse] = whole.along_rows;
  const bool one_scale = scale.dim() == 0;
  part.along_rows = {rows_of_part(data, batch, rank, count),
                     one_scale ? scale : scales_of_part(whole.along_rows, batch, rank, count),
                     one_scale ? inverse : aligned_scales(rows_of_part(inverse, batch, rank, count))};
  return part;
}

// Whether a product of these sizes runs in parts. bytes_of_part: that each rank sends to each other one.
bool runs_in_parts(const SequenceExchange& exchange, int64_t rows, int64_t inner, int64_t features,
                   int64_t bytes_of_part, c10::Device device) {
  return !exchange.chooses_by_size() || !device.is_cuda() ||
         gains_by_parts({exchange.count(), rows, inner, features, bytes_of_part});
}

// Computes one product of a pass.
at::Tensor product(const Products& products, Pass pass, const Operand& rows, const Operand& weight) {
  return pass == Pass::Forward ? products.forward(rows, weight) : products.grad_input(rows, weight);
}

// Gathers an operand's rows, some of which are on each rank.
class PulledGather {
 public:
  /// part: [B, S/N, F]; `rows`: the result of Products::part for it. With a scale for the whole, the cast is
  /// sent instead of the values.
  PulledGather(const SequenceExchange& exchange, const Operand& rows, const at::Tensor& part)
      : exchange_(exchange),
        count_(exchange.count()),
        sizes_(part.sizes().vec()),
        dtype_(rows.dtype),
        sent_as_(rows.dtype) {
    at::Tensor sent = rows.values;
    if (rows.along_rows.defined()) {
      scale_ = rows.along_rows.scale;
      inverse_ = rows.along_rows.inverse;
      sent_as_ = rows.along_rows.data.scalar_type();
      sent = as_bytes(rows.along_rows.data);
    }
    sent = sent.contiguous().view(sizes_);
    sizes_[1] *= count_;
    if (exchange.at_once()) {
      whole_ = operand_of_sent(exchange.gather_whole(sent));
      return;
    }
    gather_ = exchange.gather(sent);
    options_ = sent.options();
    bytes_of_part_ = static_cast<int64_t>(sent.nbytes());
  }

  bool complete() const { return !gather_; }
  /// Whether some parts haven't arrived yet, and these products of so many features can multiply parts one by one and
  /// gain by it.
  bool multiplies_parts(const Products& products, Pass pass, int64_t features) const {
    return gather_ && (scale_.defined() || products.multiplies_rows_apart(pass)) &&
           runs_in_parts(exchange_, sizes_[0] * sizes_[1], sizes_[2], features, bytes_of_part_,
                         options_.device());
  }
  /// The product [B, S, features]: each part is multiplied by `weight` as it arrives.
  at::Tensor multiply_parts(const Products& products, Pass pass, const Operand& weight, int64_t features) {
    at::Tensor result = at::empty(with_features(sizes_, features), options_.dtype(dtype_));
    const Operand prepared = products.weight(weight, pass);
    take_parts([&](int rank, const at::Tensor& part) {
      const at::Tensor place = part_of_sequence(result, rank, count_);
      const Operand rows = operand_of_sent(part);
      if (products.put_product(place.is_contiguous() ? as_rows(place) : place, pass, rows, prepared)) return;
      place.copy_(product(products, pass, rows, prepared).view(place.sizes()));
    });
    return result;
  }
  /// Waits for all parts. Returns rows [B * S, F].
  const Operand& whole() {
    if (gather_) take_parts([](int, const at::Tensor&) {});
    return whole_;
  }

 private:
  Operand operand_of_sent(const at::Tensor& sent) const {
    const at::Tensor rows = as_rows(sent);
    if (!scale_.defined()) return rows;
    Operand operand;
    operand.dtype = dtype_;
    operand.along_rows = {rows.view(sent_as_), scale_, inverse_};
    return operand;
  }

  template <class Use>
  void take_parts(const Use& use) {
    for (int rank = gather_->next(); rank >= 0; rank = gather_->next()) use(rank, gather_->part(rank));
    whole_ = operand_of_sent(gather_->whole());
    gather_.reset();
  }

  const SequenceExchange& exchange_;
  int count_;
  Sizes sizes_;  // whole sizes
  at::ScalarType dtype_, sent_as_;
  at::Tensor scale_, inverse_;  // undefined: the values are sent
  std::unique_ptr<SequenceExchange::Gather> gather_;
  at::TensorOptions options_;  // Options of the tensor that is sent.
  int64_t bytes_of_part_ = 0;
  Operand whole_;
};

struct Summand {
  const Products* products;
  Operand rows;  // [B * S, F]
  Operand weight;
};

// sizes: the result's.
bool sums_in_parts(const SequenceExchange& exchange, const std::vector<Summand>& summands,
                   const Sizes& sizes) {
  const auto stored = [](const Operand& rows) {
    return rows.values.defined() ? rows.values : rows.along_rows.data;
  };
  int64_t inner = 0;
  for (const Summand& each : summands) inner += stored(each.rows).size(1);
  const Operand& first = summands[0].rows;
  const auto element = static_cast<int64_t>(c10::elementSize(first.dtype));
  const int64_t rows = sizes[0] * sizes[1], features = sizes[2];
  return runs_in_parts(exchange, rows, inner, features, rows / exchange.count() * features * element,
                       stored(first).device());
}

// Sums products over the summands and over ranks, and scatters the result. `meanwhile` runs once all parts
// are being sent.
template <class Meanwhile>
at::Tensor multiply_and_scatter(const SequenceExchange& exchange, Pass pass, std::vector<Summand> summands,
                                const Sizes& sizes, const Meanwhile& meanwhile) {
  std::vector<const Products*> products;
  std::vector<Operand> weights;
  for (const Summand& each : summands) {
    products.push_back(each.products);
    weights.push_back(each.weight);
  }
  cast_weights(products, weights, pass);
  for (size_t i = 0; i < summands.size(); ++i) summands[i].weight = products[i]->weight(weights[i], pass);
  Sizes part_sizes = sizes;
  part_sizes[1] /= exchange.count();
  const auto sum_over = [&](const auto& rows_of) {
    at::Tensor sum;
    for (const Summand& each : summands) {
      // Only gradients of inputs have several summands.
      sum = sum.defined() ? each.products->add_grad_input(sum, rows_of(each), each.weight)
                          : product(*each.products, pass, rows_of(each), each.weight);
    }
    return sum;
  };
  at::Tensor whole;
  if (!sums_in_parts(exchange, summands, sizes))
    whole = sum_over([](const Summand& each) -> const Operand& { return each.rows; }).view(sizes);
  const auto scatter = exchange.scatter();
  for (int rank = scatter->next(); rank >= 0; rank = scatter->next()) {
    if (whole.defined()) {
      scatter->give(part_of_sequence(whole, rank, exchange.count()).contiguous());
      continue;
    }
    scatter->give(sum_over([&](const Summand& each) {
                    return part_of_sequence(each.rows, sizes[0], rank, exchange.count());
                  }).view(part_sizes));
  }
  meanwhile();
  return scatter->finish();
}

struct GatheredLinearsBackward final : JointNode {
  std::shared_ptr<const SequenceExchange> exchange;
  Sizes whole_sizes;  // sizes of x on all ranks together

  void backward(const variable_list& grads, variable_list& results) override {
    const bool wants_x = task_should_compute_output(0);
    if (!wants_x || exchange->at_once()) {
      const at::Tensor grad_x = both_gradients(grads, results);
      if (wants_x) results[0] = exchange->scatter_whole(grad_x.view(whole_sizes));
      return;
    }
    unpack_x(grads);  // before any exchange: with checkpointing this may run the layer again
    std::vector<Operand> operands(weights.size());
    std::vector<Summand> summands;
    for (size_t i = 0; i < weights.size(); ++i) {
      if (!grads[i].defined()) continue;
      operands[i] = grad_operand(grads, i);
      summands.push_back({products[i].get(), operands[i], weights[i].unpack()});
    }
    results[0] = multiply_and_scatter(*exchange, Pass::Backward, std::move(summands), whole_sizes, [&] {
      for (size_t i = 0; i < weights.size(); ++i)
        if (wants_weight(i, grads)) add_weight_gradient(i, operands[i], results);
      x.forget_unpacked();
    });
  }
  std::string name() const override { return "titan::gathered_linears backward"; }
};

struct ScatteredLinearBackward final : BackwardNode {
  enum Input : size_t { X, Weight };
  SavedInput x;
  SavedWeight weight;
  int64_t features = 0;
  SharedProducts products;
  std::shared_ptr<const SequenceExchange> exchange;

  variable_list backward(const at::Tensor& grad) override {
    variable_list results(2);
    const bool wants_x = task_should_compute_output(X), wants_weight = task_should_compute_output(Weight);
    // Unpack first: with checkpointing this may run the layer again, whose exchanges must end before this one
    // begins.
    const Operand weight_OI = wants_x ? weight.unpack() : Operand();
    Operand x_NI = wants_weight ? x.unpack_saved() : Operand();
    PulledGather gather(*exchange, products->part(as_rows(grad), Pass::Backward, /*trains=*/true), grad);
    const bool by_parts = wants_x && gather.multiplies_parts(*products, Pass::Backward, features);
    if (by_parts) results[X] = gather.multiply_parts(*products, Pass::Backward, weight_OI, features);
    // Always gather, because data that the peers sent must be received.
    const Operand whole = products->grad(gather.whole(), wants_x && !by_parts, wants_weight);
    if (wants_x && !by_parts) {
      Sizes sizes = with_features(grad.sizes(), features);
      sizes[1] *= exchange->count();
      results[X] = products->grad_input(whole, weight_OI).view(sizes);
    }
    if (!wants_weight) return results;
    x.recompute(x_NI, results[X]);
    results[Weight] = weight_gradient(products, weight.sink, whole, as_rows(std::move(x_NI)));
    return results;
  }
  void release_variables() override {
    x.reset_data();
    weight.saved.reset_data();
  }
  std::string name() const override { return "titan::scattered_linear backward"; }
};

// Products of layers that share one gathered input.
class GatheredProducts {
 public:
  GatheredProducts(const at::Tensor& x, const ProductsOfEach& products, const std::vector<bool>& keeps,
                   const SequenceExchange& exchange)
      : products_(products),
        input_(products, keeps, /*recomputed=*/false),
        gather_(exchange,
                input_.alike() ? products[0]->part(as_rows(x), Pass::Forward, at::GradMode::is_enabled())
                               : Operand(as_rows(x)),
                x) {}

  at::Tensor output(size_t i, const Operand& weight, const Sizes& sizes) {
    if (gather_.multiplies_parts(*products_[i], Pass::Forward, sizes.back()))
      return gather_.multiply_parts(*products_[i], Pass::Forward, weight, sizes.back());
    return products_[i]->forward(input_.cast(i, gather_.whole()), weight).view(sizes);
  }
  bool complete() const { return gather_.complete(); }
  /// Saves the input for the backward.
  void save(KeptJointInput& x) { x.save({}, gather_.whole(), input_); }
  /// Receives the rest, because data that the peers sent must be received even if it isn't needed.
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
  for (const SinkedWeight& each : weights) check_linear_shapes("gathered_linears", x, each.weight, 3);
  const auto node = make_joint_node<GatheredLinearsBackward>(x, weights, products);
  Sizes sizes = x.sizes().vec();
  sizes[1] *= exchange->count();
  if (node) {
    node->exchange = exchange;
    node->whole_sizes = sizes;
  }
  const std::vector<bool> keeps = keeps_of(node, weights);
  auto gathered = below_autograd([&] { return GatheredProducts(x, products, keeps, *exchange); });
  const auto save = [&] {
    if (any_of(keeps)) gathered.save(node->x);
  };
  // Save it before the products ([Note: kept outputs]), unless parts are still arriving.
  const bool arrived = gathered.complete();
  if (arrived) save();
  ForwardWeights read(weights, products);
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < weights.size(); ++i)
    outputs.push_back(kept(KeptKind::Product, weights[i].weight, [&] {
      return gathered.output(i, read.take(i), with_features(sizes, weights[i].weight.size(0)));
    }));
  below_autograd([&] { gathered.finish(); });
  if (!arrived) save();
  if (node)
    for (at::Tensor& output : outputs) set_history(output, node);
  return outputs;
}

at::Tensor scattered_linear(const at::Tensor& x, const SinkedWeight& weight, const SharedProducts& products,
                            const std::shared_ptr<const SequenceExchange>& exchange) {
  check_linear_shapes("scattered_linear", x, weight.weight, 3);
  TITAN_CHECK(x.size(1) % exchange->count() == 0, "scattered_linear: a sequence of ", x.size(1),
              " can't be cut into ", exchange->count(), " equal parts");
  const bool trains = at::GradMode::is_enabled();
  const bool keeps =
      compute_requires_grad(weight.weight) && !SavedInput::recomputes(x) && !saved_tensors_are_dropped();
  const Operand input = below_autograd([&] {
    return keeps ? products->scaled_to_keep(as_rows(x), trains) : products->scaled(as_rows(x), trains);
  });
  std::shared_ptr<ScatteredLinearBackward> node;
  if (compute_requires_grad(x, weight.weight)) {
    node = make_node<ScatteredLinearBackward>(x, weight.weight);
    if (compute_requires_grad(weight.weight)) node->x = SavedInput(x, input, *products);
    node->weight = SavedWeight(weight, x.requires_grad());
    node->features = weight.weight.size(1);
    node->products = products;
    node->exchange = exchange;
  }
  const Sizes sizes = with_features(x.sizes(), weight.weight.size(0));
  const at::Tensor y = kept(KeptKind::ReduceScatter, weight.weight, [&] {
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

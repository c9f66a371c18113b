#include "titan/nn/layers.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

#include "dist/trace_range.h"
#include "nn/trace_labels.h"
#include "titan/core/error.h"
#include "titan/tensor/placement.h"

namespace titan::nn {

// ---- linear layers

void set_products(torch::nn::Module& root, const ops::SharedProducts& products) {
  root.apply([&products](torch::nn::Module& module) {
    if (auto* user = dynamic_cast<ProductsUser*>(&module)) user->set_products(products);
  });
}

bool WeightedModule::set_grad_sink(std::string_view name, std::shared_ptr<ops::GradSink> sink) {
  if (name != "weight") return false;
  weight_sink_ = std::move(sink);
  return true;
}

LinearImpl::LinearImpl(int64_t in_features, int64_t out_features, const LinearOptions& options)
    : products_(ops::default_products()) {
  const double bound = in_features > 0 ? 1.0 / std::sqrt(static_cast<double>(in_features)) : 0.0;
  const Init uniform = Init::uniform(-bound, bound);
  weight = register_init_parameter("weight", {out_features, in_features}, options.init.value_or(uniform),
                                   options.construct);
  if (options.bias) bias = register_init_parameter("bias", {out_features}, uniform, options.construct);
}

at::Tensor LinearImpl::forward(const at::Tensor& x) {
  check_entered_through_ref();
  if (exchange_ && exchange_split_ == Split::Columns)
    return ops::gathered_linears(x, {sinked_weight()}, {products_}, exchange_)[0];
  if (exchange_) return ops::scattered_linear(x, sinked_weight(), products_, exchange_);
  // Multiplied by zero, not left out, because its gradient must exist on all ranks.
  const at::Tensor added = !bias.defined() || adds_bias_ ? bias : bias * 0;
  return ops::linear(x, sinked_weight(), added, products_);
}

std::vector<ParamSplit> LinearImpl::param_splits(Split split) const {
  const bool columns = split == Split::Columns;
  std::vector<ParamSplit> splits{{"weight", columns ? 0 : 1}};
  if (bias.defined()) splits.push_back({"bias", columns ? 0 : -1, /*gradient_is_summand=*/!columns});
  return splits;
}

void LinearImpl::set_split(Split split, std::shared_ptr<const ops::RankParts> parts) {
  adds_bias_ = split == Split::Columns || parts->index() == 0;
  (split == Split::Columns ? parts_.out : parts_.in) = std::move(parts);
  set_products(products_);
}

void LinearImpl::set_products(ops::SharedProducts products) {
  auto own = parts_.in || parts_.out ? products->for_parts(parts_) : nullptr;
  products_ = own ? std::move(own) : std::move(products);
}

void LinearImpl::set_exchange(Split split, std::shared_ptr<const ops::SequenceExchange> exchange) {
  TITAN_CHECK(!bias.defined(), "linear layer '", fqn(),
              "' has a bias: its communication can't be overlapped");
  exchange_split_ = split;
  exchange_ = std::move(exchange);
}

bool LinearImpl::joins(const LinearImpl& other) const {
  const auto carrier = [](const LinearImpl& layer) {
    return layer.exchange_ ? layer.exchange_->carrier() : nullptr;
  };
  const bool same_way = carrier(*this) == carrier(other) && exchange_split_ == other.exchange_split_;
  return same_way && !bias.defined() && !is_wrapped() && (!label_hook || only_traces(label_hook));
}

namespace {

// "layers.3.attention.wq+wk+wv"
std::string joint_name(std::initializer_list<const Linear*> layers) {
  std::string name;
  for (const Linear* layer : layers) {
    const std::string& fqn = (*layer)->fqn();
    name += name.empty() ? fqn : "+" + fqn.substr(fqn.rfind('.') + 1);
  }
  return name;
}

}  // namespace

// A layer with its own hooks must be called separately.
std::vector<at::Tensor> linears(const at::Tensor& x, std::initializer_list<const Linear*> layers) {
  const LinearImpl& first = **(*layers.begin());
  const bool sums = first.exchange_ && first.exchange_split_ == Split::Rows;
  const bool joint = !sums && std::all_of(layers.begin(), layers.end(),
                                          [&](const Linear* layer) { return (*layer)->joins(first); });
  std::vector<at::Tensor> results;
  if (!joint) {
    for (const Linear* layer : layers) results.push_back((*layer)(x));
    return results;
  }
  const dist::TraceRange traced([&] { return joint_name(layers); });
  std::vector<ops::SinkedWeight> weights;
  std::vector<ops::SharedProducts> products;
  for (const Linear* layer : layers) {
    weights.push_back((*layer)->sinked_weight());
    products.push_back((*layer)->products_);
  }
  if (!first.exchange_) return ops::joint_linears(x, weights, products);
  return ops::gathered_linears(x, weights, products, first.exchange_);
}

// ---- embedding

EmbeddingImpl::EmbeddingImpl(int64_t num_embeddings, int64_t dim, const Construct& construct,
                             const Init& init)
    : num_embeddings_(num_embeddings) {
  weight = register_init_parameter("weight", {num_embeddings, dim}, init, construct);
}

at::Tensor EmbeddingImpl::forward(const at::Tensor& tokens) {
  check_entered_through_ref();
  return ops::embedding(weight, tokens, weight_sink_, part_);
}

std::vector<ParamSplit> EmbeddingImpl::param_splits(Split split) const {
  return {{"weight", split == Split::Rows ? 0 : 1}};
}

void EmbeddingImpl::set_split(Split split, std::shared_ptr<const ops::RankParts> parts) {
  if (split == Split::Columns) return;
  const Chunk rows = chunk_of(num_embeddings_, parts->count(), parts->index());
  part_ = {.first = rows.offset, .size = num_embeddings_, .parts = std::move(parts)};
}

// ---- RMS norm

RMSNormImpl::RMSNormImpl(int64_t dim, double eps, const Construct& construct) : eps_(eps) {
  weight = register_init_parameter("weight", {dim}, Init::constant(1), construct);
}

at::Tensor RMSNormImpl::forward(const at::Tensor& x) {
  check_entered_through_ref();
  return ops::rms_norm(x, weight, eps_, weight_sink_);
}

ops::NormedSum RMSNormImpl::forward(const at::Tensor& x, const at::Tensor& added) {
  check_entered_through_ref();
  return ops::add_rms_norm(x, added, weight, eps_, weight_sink_);
}

// ---- feed-forward

FeedForwardImpl::FeedForwardImpl(const FeedForwardOptions& options) : w1(nullptr), w2(nullptr), w3(nullptr) {
  const LinearOptions gate{.init = options.gate_init, .construct = options.construct};
  const LinearOptions output{.init = options.output_init, .construct = options.construct};
  w1 = register_module("w1", Linear(options.dim, options.hidden_dim, gate));
  w2 = register_module("w2", Linear(options.hidden_dim, options.dim, output));
  w3 = register_module("w3", Linear(options.dim, options.hidden_dim, output));
}

at::Tensor FeedForwardImpl::forward(const at::Tensor& x) {
  check_entered_through_ref();
  const std::vector<at::Tensor> gate_and_up = linears(x, {&w1, &w3});
  return w2(ops::swiglu(gate_and_up[0], gate_and_up[1]));
}

// ---- rotary positions

namespace {

at::Tensor scaled(const at::Tensor& frequencies, const RotaryScaling& scaling) {
  const auto length = static_cast<double>(scaling.original_length);
  const at::Tensor wavelength = 2 * std::numbers::pi / frequencies;
  const at::Tensor is_slow = wavelength > length / scaling.low_freq_factor;
  const at::Tensor is_fast = wavelength < length / scaling.high_freq_factor;
  const at::Tensor slowed = frequencies / scaling.factor;
  const at::Tensor blend =
      (length / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor);
  const at::Tensor blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies;
  return at::where(is_fast, frequencies, at::where(is_slow, slowed, blended));
}

}  // namespace

at::Tensor rotary_frequencies(int64_t head_dim, double theta, const std::optional<RotaryScaling>& scaling,
                              at::ScalarType dtype) {
  const at::Tensor exponents = at::arange(0, head_dim, 2).to(dtype) / head_dim;
  const at::Tensor frequencies = 1.0 / at::pow(theta, exponents);
  return scaling ? scaled(frequencies, *scaling) : frequencies;
}

RotaryEmbeddingImpl::RotaryEmbeddingImpl(const RotaryOptions& options) : options_(options) {
  TITAN_CHECK(options.head_dim > 0 && options.head_dim % 2 == 0,
              "rotary embedding: expected an even head size, got ", options.head_dim);
  if (!options.construct.deferred) reset_buffers(options.construct.device);
}

void RotaryEmbeddingImpl::reset_buffers(const at::Device& device) {
  at::NoGradGuard no_grad;
  const at::ScalarType dtype = options_.construct.dtype == at::kDouble ? at::kDouble : at::kFloat;
  if (device.is_meta()) {
    table_ = at::empty({options_.max_positions, options_.head_dim},
                       at::TensorOptions().dtype(dtype).device(device));
    return;
  }
  const at::Tensor positions = at::arange(options_.max_positions).to(dtype);
  const at::Tensor frequencies =
      rotary_frequencies(options_.head_dim, options_.theta, options_.scaling, dtype);
  const at::Tensor angles = at::outer(positions, frequencies);
  table_ = at::stack({angles.cos(), angles.sin()}, -1).flatten(1).to(device);
}

std::pair<at::Tensor, at::Tensor> RotaryEmbeddingImpl::forward(const at::Tensor& q_BSHD,
                                                               const at::Tensor& k_BSKD,
                                                               const at::Tensor& positions) {
  check_entered_through_ref();
  TITAN_CHECK(table_.defined(), "rotary embedding '", fqn(),
              "' has no table yet: call titan::materialize(model, seed) first");
  if (positions.defined() || !token_positions_) return ops::joint_rotary(q_BSHD, k_BSKD, table_, positions);
  return ops::joint_rotary(q_BSHD, k_BSKD, table_, token_positions_->of(q_BSHD.size(1), q_BSHD.device()));
}

// ---- attention: B batch, S sequence, D model, H query heads, K key/value heads, E size of a head

AttentionImpl::AttentionImpl(const AttentionOptions& options, RotaryEmbedding rotary)
    : wq(nullptr),
      wk(nullptr),
      wv(nullptr),
      wo(nullptr),
      head_dim_(options.dim / options.num_heads),
      rotary_(std::move(rotary)) {
  TITAN_CHECK(options.dim % options.num_heads == 0 && options.num_heads % options.num_kv_heads == 0,
              "attention: the number of heads, ", options.num_heads, ", must divide the model's size, ",
              options.dim, ", and be a multiple of the number of key/value heads, ", options.num_kv_heads);
  const int64_t kv_dim = options.num_kv_heads * head_dim_;
  const LinearOptions input{.init = options.input_init, .construct = options.construct};
  const LinearOptions output{.init = options.output_init, .construct = options.construct};
  wq = register_module("wq", Linear(options.dim, options.dim, input));
  wk = register_module("wk", Linear(options.dim, kv_dim, input));
  wv = register_module("wv", Linear(options.dim, kv_dim, input));
  wo = register_module("wo", Linear(options.dim, options.dim, output));
}

at::Tensor AttentionImpl::forward(const at::Tensor& x_BSD, const at::Tensor& positions,
                                  const ops::Documents& documents) {
  check_entered_through_ref();
  TITAN_CHECK(
      !core_ || !documents, "attention '", fqn(),
      "' was called with documents, and its sequences are spread over ranks, which attend to whole rows");
  const auto split_heads = [this](const at::Tensor& x) { return x.unflatten(-1, {-1, head_dim_}); };
  const std::vector<at::Tensor> products = linears(x_BSD, {&wq, &wk, &wv});
  const auto [q_BSHE, k_BSKE] = rotary_(split_heads(products[0]), split_heads(products[1]), positions);
  const at::Tensor v_BSKE = split_heads(products[2]);
  const at::Tensor out_BSHE = core_ ? core_->attend(q_BSHE, k_BSKE, v_BSKE)
                                    : ops::causal_attention(q_BSHE, k_BSKE, v_BSKE, documents);
  return wo(out_BSHE.flatten(2));
}

}  // namespace titan::nn

#include "titan/nn/linear.h"

#include <algorithm>
#include <cmath>

#include <ATen/TensorOperators.h>

#include "dist/trace_range.h"
#include "nn/trace_labels.h"
#include "titan/core/error.h"

namespace titan::nn {

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
    return ops::gathered_linears(x, {sinked_weight()}, products_, exchange_)[0];
  if (exchange_) return ops::scattered_linear(x, sinked_weight(), products_, exchange_);
  // Times zero rather than left out: its gradient must exist on all ranks.
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

// A layer with hooks of its own must be called.
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

}  // namespace titan::nn

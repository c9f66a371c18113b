#include "parallel/activation_checkpoint/kept_outputs.h"

#include <algorithm>

#include <torch/nn/module.h>

#include "parallel/activation_checkpoint/saved_tensor_hooks.h"
#include "titan/core/error.h"
#include "titan/nn/hooks.h"
#include "titan/nn/layers.h"

namespace titan::activations {

namespace {

bool contains_any(const std::string& name, const std::vector<std::string>& parts) {
  return std::any_of(parts.begin(), parts.end(),
                     [&](const std::string& part) { return name.find(part) != std::string::npos; });
}

const at::Tensor* weight_of(torch::nn::Module& module) {
  return dynamic_cast<nn::ProductsUser*>(&module) ? module.named_parameters(/*recurse=*/false).find("weight")
                                                  : nullptr;
}

}  // namespace

ProductChoice::ProductChoice(const nn::AnyRef& layer, const SelectiveOp& policy) {
  const std::string& prefix = layer.host().fqn();
  for (const auto& named : layer.module().named_modules(prefix, /*include_self=*/true)) {
    const bool recomputed = contains_any(named.key(), policy.recompute_products);
    const at::Tensor* weight = weight_of(*named.value());
    TITAN_CHECK(weight || !recomputed, "checkpoint_activations: '", named.key(),
                "' is to be recomputed by name, but it isn't a linear module; products are named by the "
                "module that multiplies, as in \"attention.wq\"");
    if (weight) products_.push_back({weight->unsafeGetTensorImpl(), recomputed});
  }
}

bool ProductChoice::keeps(const at::Tensor& weight) {
  for (Product& product : products_) {
    if (product.weight != weight.unsafeGetTensorImpl()) continue;
    if (product.recomputed) return false;
    if (product.number < 0) product.number = num_numbered_++;
    return product.number % 2 == 0;
  }
  return false;
}

ops::SavedOutputs::Action KeptOutputs::next(ops::KeptKind kind, const at::Tensor& weight) {
  if (kind == ops::KeptKind::Product && !products_->keeps(weight)) return Action::Compute;
  asking_ = {kind, weight.unsafeGetTensorImpl()};
  if (!handing_back_) return Action::Keep;
  if (next_ == kept_.size()) return Action::Compute;
  TITAN_CHECK(kept_[next_].source == asking_, "recomputing '", module_,
              "' ran its products and attentions in another order than the forward: a checkpointed "
              "module has to take the same path twice");
  return Action::HandBack;
}

void KeptOutputs::keep(const at::Tensor& output) {
  kept_.push_back({asking_, without_graph(output), output._version(), num_saved_});
}

at::Tensor KeptOutputs::hand_back() {
  TITAN_INTERNAL_ASSERT(next_ < kept_.size(), "kept output ", next_, " of ", kept_.size());
  const Kept& kept = kept_[next_++];
  TITAN_CHECK(kept.output._version() == kept.version,
              "a result that selective checkpointing keeps for the backward of '", module_, "', of shape ",
              kept.output.sizes(),
              ", was written to after the operation returned it: use an operation that isn't in place");
  return without_graph(kept.output);
}

void KeptOutputs::drop_unreachable() {
  while (!kept_.empty() && kept_.back().num_saved == num_saved_) kept_.pop_back();
}

void KeptOutputs::start_handing_back() {
  handing_back_ = true;
  next_ = 0;
}

}  // namespace titan::activations

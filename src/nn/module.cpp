#include "titan/nn/module.h"

#include "tensor/model_memory.h"
#include "titan/core/error.h"

namespace titan::nn {

void HookHost::check_entered_through_ref() const {
  TITAN_CHECK(
      depth_ > 0 || !is_wrapped(), "module '", fqn_,
      "' is wrapped (fully_shard, parallelize, ...) but was called without titan::nn::Ref: call it through "
      "its holder, not by impl->forward() or torch::nn::Sequential");
}

void HookHost::refuse_if_wrapped(const char* operation) const {
  TITAN_CHECK(!is_wrapped() && !param_owner, operation, "() on module '", fqn_,
              "' after it was wrapped would replace what the wrapper holds; call it before wrapping");
}

void name_modules(torch::nn::Module& root) {
  for (const auto& named : root.named_modules(/*name_prefix=*/"", /*include_self=*/false))
    if (auto* host = dynamic_cast<HookHost*>(named.value().get())) host->set_fqn(named.key());
}

std::vector<HookHost*> hook_hosts(torch::nn::Module& root) {
  std::vector<HookHost*> hosts;
  const auto add = [&](torch::nn::Module& module) {
    if (auto* host = dynamic_cast<HookHost*>(&module)) hosts.push_back(host);
  };
  add(root);  // which a shared pointer may not own
  for (const auto& module : root.modules(/*include_self=*/false)) add(*module);
  return hosts;
}

// Parameters without memory can't be copied, and a parameter can't change its device and stay the same
// object.
void Module::check_movable() const {
  refuse_if_wrapped("to");
  for (const at::Tensor& parameter : parameters(/*recurse=*/false))
    TITAN_CHECK(!is_deferred(parameter), "to() on module '", fqn(),
                "', whose parameters have no memory yet: construct it with its final device and dtype, or "
                "materialize() it first");
}

at::Tensor Module::register_init_parameter(const std::string& name, at::IntArrayRef sizes, const Init& init,
                                           const Construct& construct) {
  at::Tensor parameter =
      deferred_tensor(sizes, at::TensorOptions().dtype(construct.dtype).device(construct.device));
  if (!construct.deferred) {
    param_storage::allocate(parameter);
    const Box whole{std::vector<int64_t>(sizes.size(), 0), sizes.vec()};
    if (!parameter.is_meta()) fill(parameter, init, {.seed = 0, .name = name}, sizes, whole);
  }
  param_inits_.push_back({name, init});
  return register_parameter(name, parameter);
}

}  // namespace titan::nn

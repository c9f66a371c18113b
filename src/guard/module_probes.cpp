#include "guard/module_probes.h"

#include <torch/nn/module.h>

namespace titan::train {

namespace {

void for_each_host(const std::vector<nn::AnyRef>& models, const std::function<void(nn::HookHost&)>& visit) {
  for (const nn::AnyRef& model : models)
    for (nn::HookHost* host : nn::hook_hosts(model.module())) visit(*host);
}

using IsOurs = std::function<bool(const nn::CallHook&)>;

std::shared_ptr<nn::CallHook> without(const std::shared_ptr<nn::CallHook>& hook, const IsOurs& is_ours) {
  const auto probe = std::dynamic_pointer_cast<ModuleProbe>(hook);
  if (!probe) return hook;
  auto inner = without(probe->inner(), is_ours);
  if (is_ours(*probe)) return inner;
  probe->set_inner(std::move(inner));
  return hook;
}

}  // namespace

void add_probes(const std::vector<nn::AnyRef>& models, const MakeProbe& make) {
  for_each_host(models, [&](nn::HookHost& host) { host.label_hook = make(host.label_hook); });
}

void add_root_probes(const std::vector<nn::AnyRef>& models, const MakeProbe& make) {
  for (const nn::AnyRef& model : models) model.host().label_hook = make(model.host().label_hook);
}

void remove_probes(const std::vector<nn::AnyRef>& models, const IsOurs& is_ours) {
  for_each_host(models, [&](nn::HookHost& host) { host.label_hook = without(host.label_hook, is_ours); });
}

std::string module_name(const nn::HookHost& host) {
  return host.fqn().empty() ? "model" : "'" + host.fqn() + "'";
}

}  // namespace titan::train

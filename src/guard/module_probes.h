#pragma once

// Hooks around the label hooks of all modules of some models, added and removed together.

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include "titan/nn/hooks.h"

namespace titan::train {

/// A label hook around another one, which may be null. before() runs before the inner hook, after() after it.
class ModuleProbe : public nn::CallHook {
 public:
  explicit ModuleProbe(std::shared_ptr<nn::CallHook> inner) : inner_(std::move(inner)) {}
  void pre_forward(nn::HookHost& host, const nn::TensorRefs& inputs) final {
    before(host, inputs);
    if (inner_) inner_->pre_forward(host, inputs);
  }
  void post_forward(nn::HookHost& host, const nn::TensorRefs& outputs) final {
    if (inner_) inner_->post_forward(host, outputs);
    after(host, outputs);
  }
  const std::shared_ptr<nn::CallHook>& inner() const { return inner_; }
  void set_inner(std::shared_ptr<nn::CallHook> inner) { inner_ = std::move(inner); }

 protected:
  virtual void before(nn::HookHost& host, const nn::TensorRefs& inputs) = 0;
  virtual void after(nn::HookHost& host, const nn::TensorRefs& outputs) = 0;

 private:
  std::shared_ptr<nn::CallHook> inner_;
};

using MakeProbe = std::function<std::shared_ptr<ModuleProbe>(std::shared_ptr<nn::CallHook> inner)>;

inline void for_each_host(const std::vector<nn::AnyRef>& models,
                          const std::function<void(nn::HookHost&)>& visit) {
  for (const nn::AnyRef& model : models)
    for (nn::HookHost* host : nn::hook_hosts(model.module())) visit(*host);
}

/// Adds a probe to every hookable module of `models`, roots included.
inline void add_probes(const std::vector<nn::AnyRef>& models, const MakeProbe& make) {
  for_each_host(models, [&](nn::HookHost& host) { host.label_hook = make(host.label_hook); });
}

/// Adds a probe to the roots only.
inline void add_root_probes(const std::vector<nn::AnyRef>& models, const MakeProbe& make) {
  for (const nn::AnyRef& model : models) model.host().label_hook = make(model.host().label_hook);
}

using IsOurs = std::function<bool(const nn::CallHook&)>;

/// Returns the chain of probes without those that are ours.
inline std::shared_ptr<nn::CallHook> without_probes(const std::shared_ptr<nn::CallHook>& hook,
                                                    const IsOurs& is_ours) {
  const auto probe = std::dynamic_pointer_cast<ModuleProbe>(hook);
  if (!probe) return hook;
  auto inner = without_probes(probe->inner(), is_ours);
  if (is_ours(*probe)) return inner;
  probe->set_inner(std::move(inner));
  return hook;
}

/// Removes the probes that are ours, wherever they are in a chain of probes.
inline void remove_probes(const std::vector<nn::AnyRef>& models, const IsOurs& is_ours) {
  for_each_host(models,
                [&](nn::HookHost& host) { host.label_hook = without_probes(host.label_hook, is_ours); });
}

/// For messages: "'layers.3.attention'", or "model" for a root.
inline std::string module_name(const nn::HookHost& host) {
  return host.fqn().empty() ? "model" : "'" + host.fqn() + "'";
}

}  // namespace titan::train

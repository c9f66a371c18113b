#pragma once

// Hooks around the label hooks of all modules of some models, added and removed together.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "titan/nn/hooks.h"

namespace titan::train {

/// A label hook around another one, which may be null. Its own part is the outer one.
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

/// Adds a probe to every hookable module of `models`, roots included.
void add_probes(const std::vector<nn::AnyRef>& models, const MakeProbe& make);
/// Adds a probe to the roots only.
void add_root_probes(const std::vector<nn::AnyRef>& models, const MakeProbe& make);
/// Removes the probes that `is_ours`, wherever they are in a chain of probes.
void remove_probes(const std::vector<nn::AnyRef>& models,
                   const std::function<bool(const nn::CallHook&)>& is_ours);

/// For messages: "'layers.3.attention'", or "model" for a root.
std::string module_name(const nn::HookHost& host);

}  // namespace titan::train

#pragma once

// Hooks around the label hooks of all modules below some roots, put in and taken out together.

#include <functional>
#include <memory>
#include <vector>

#include "titan/nn/hooks.h"

namespace titan::train {

/// A label hook around another one, which may be null: its own part is outside.
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

/// Of all hookable modules of `models`, roots among them.
void add_probes(const std::vector<nn::AnyRef>& models, const MakeProbe& make);
/// Of the roots alone.
void add_root_probes(const std::vector<nn::AnyRef>& models, const MakeProbe& make);
/// Those that `is_ours`, wherever they are among probes around each other.
void remove_probes(const std::vector<nn::AnyRef>& models,
                   const std::function<bool(const nn::CallHook&)>& is_ours);

/// For messages: "layers.3.attention", "model" for a root.
std::string module_name(const nn::HookHost& host);

}  // namespace titan::train

#pragma once

// nn::Module: torch::nn::Module that can be wrapped, built deferred, and initialized independently of the
// layout.

#include <string>

#include <torch/nn/module.h>

#include "titan/nn/construct.h"
#include "titan/nn/hooks.h"

namespace titan::nn {

/// Base of hookable modules. A user's own Impl may inherit `torch::nn::Module, HookHost` instead and define
/// as_module().
class Module : public torch::nn::Module, public HookHost {
 public:
  using torch::nn::Module::Module;
  torch::nn::Module& as_module() override { return *this; }

  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override;

 protected:
  /// Registers a parameter of these sizes with its distribution. When `construct` isn't deferred it is drawn
  /// at once with seed 0 and its local name; materialize() draws again with the run's seed and the full name.
  at::Tensor register_init_parameter(const std::string& name, at::IntArrayRef sizes, const Init& init,
                                     const Construct& construct);
};

/// LibTorch's own module as a hookable one: `Ref<Hooked<torch::nn::LinearImpl>>`. Its forward refuses to be
/// entered by another road than Ref once it is wrapped; torch::nn::Sequential doesn't accept it at all (use
/// nn::Sequential).
template <class Impl>
class Hooked : public Impl, public HookHost {
 public:
  using Impl::Impl;
  torch::nn::Module& as_module() override { return *this; }

  template <class... Args>
  auto forward(Args&&... args) -> decltype(std::declval<Impl&>().forward(std::forward<Args>(args)...)) {
    this->check_entered_through_ref();
    return Impl::forward(std::forward<Args>(args)...);
  }
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override {
    this->refuse_if_wrapped("to");
    Impl::to(device, dtype, non_blocking);
  }
  void to(torch::Dtype dtype, bool non_blocking = false) override {
    this->refuse_if_wrapped("to");
    Impl::to(dtype, non_blocking);
  }
  void to(torch::Device device, bool non_blocking = false) override {
    this->refuse_if_wrapped("to");
    Impl::to(device, non_blocking);
  }
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override {
    this->refuse_if_wrapped("clone");
    return Impl::clone(device);
  }
};

}  // namespace titan::nn

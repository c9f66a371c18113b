#pragma once

// AnyRef: what wrappers take. Light: whoever only passes modules around doesn't compile LibTorch's module
// headers.

#include <concepts>
#include <memory>
#include <utility>

namespace torch::nn {
class Module;
}

namespace titan::nn {

class HookHost;
template <class Impl>
class Ref;

/// Any hookable module, whatever its Impl: what wrappers take. Keeps the module alive.
class AnyRef {
 public:
  template <class Impl>
  AnyRef(const Ref<Impl>& ref) : host_(ref.ptr().get()), module_(ref.ptr()) {}  // NOLINT: implicit by design
  template <class Impl>
  requires std::derived_from<Impl, HookHost> && std::derived_from<Impl, torch::nn::Module> AnyRef(
      std::shared_ptr<Impl> impl)
      : host_(impl.get()), module_(std::move(impl)) {}  // NOLINT

  HookHost& host() const { return *host_; }
  torch::nn::Module& module() const { return *module_; }
  const std::shared_ptr<torch::nn::Module>& ptr() const { return module_; }

 private:
  HookHost* host_;
  std::shared_ptr<torch::nn::Module> module_;
};

}  // namespace titan::nn

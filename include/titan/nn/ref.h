#pragma once

// nn::Ref<Impl>: LibTorch's ModuleHolder whose call operator runs the module's hooks around forward.

#include <exception>
#include <tuple>
#include <type_traits>
#include <utility>

#include <torch/nn/pimpl.h>

#include "titan/nn/any_ref.h"
#include "titan/nn/hooks.h"
#include "titan/nn/tensor_refs.h"

namespace titan::nn {

template <class Impl>
class Ref : public torch::nn::ModuleHolder<Impl> {
 public:
  using torch::nn::ModuleHolder<Impl>::ModuleHolder;
  using ImplType = Impl;

  /// Calls forward through the hook slots. Arguments are taken by value where a hook may replace them.
  template <class... Args>
  auto operator()(Args&&... args) const {
    HookHost& host = impl();
    DepthGuard entered(host);
    if (!host.is_wrapped() && !host.label_hook) return impl().forward(std::forward<Args>(args)...);
    auto arguments = std::tuple<std::decay_t<Args>...>(std::forward<Args>(args)...);
    return call_hooked(host, arguments);
  }

 private:
  // A handle's constness isn't its module's.
  Impl& impl() const { return *this->ptr(); }

  struct DepthGuard {
    explicit DepthGuard(HookHost& host) : host(host) { ++host.depth_; }
    ~DepthGuard() { --host.depth_; }
    HookHost& host;
  };

  template <class Arguments>
  auto call_hooked(HookHost& host, Arguments& arguments) const {
    TensorRefs inputs = tensor_refs(arguments);
    if (host.fsdp_hook) host.fsdp_hook->pre_forward(host, inputs);
    if (host.label_hook) host.label_hook->pre_forward(host, inputs);
    auto result = host.checkpoint_hook ? call_checkpointed(host, arguments) : call_inner(host, arguments);
    TensorRefs outputs = tensor_refs(result);
    if (host.label_hook) host.label_hook->post_forward(host, outputs);
    if (host.fsdp_hook) host.fsdp_hook->post_forward(host, outputs);
    return result;
  }

  template <class Arguments>
  auto call_inner(HookHost& host, Arguments& arguments) const {
    if (host.prepare_input_hook) host.prepare_input_hook->pre_forward(host, tensor_refs(arguments));
    auto result = std::apply([this](auto&... values) { return impl().forward(values...); }, arguments);
    if (host.prepare_output_hook) host.prepare_output_hook->post_forward(host, tensor_refs(result));
    return result;
  }

  // The checkpoint hook sees a function from tensors to tensors; everything else of the arguments is captured
  // by value.
  template <class Arguments>
  auto call_checkpointed(HookHost& host, Arguments& arguments) const {
    using Result = decltype(call_inner(host, arguments));
    auto shape_of_result = std::make_shared<std::optional<Result>>();
    Ref self = *this;
    auto run = [self, arguments, shape_of_result](const TensorList& inputs) mutable {
      HookHost& host = self.impl();
      DepthGuard entered(host);
      Arguments values = arguments;
      replace_tensors(tensor_refs(values), inputs);
      Result result = self.call_inner(host, values);
      TensorList outputs = tensor_values(tensor_refs(result));
      if (!*shape_of_result) *shape_of_result = std::move(result);
      return outputs;
    };
    TensorList outputs = host.checkpoint_hook->call(host, tensor_values(tensor_refs(arguments)), run);
    Result result = std::move(**shape_of_result);
    replace_tensors(tensor_refs(result), outputs);
    return result;
  }
};

}  // namespace titan::nn

/// Declares `Name` as the handle of `Name##Impl`: a class of its own, so that it can be forward-declared and
/// has short messages.
#define TITAN_MODULE(Name)                           \
  class Name : public ::titan::nn::Ref<Name##Impl> { \
   public:                                           \
    using ::titan::nn::Ref<Name##Impl>::Ref;         \
  }

#pragma once

// nn::Ref<Impl>: LibTorch's ModuleHolder whose call operator runs the module's hooks around forward.

#include <memory>
#include <optional>
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

  template <class Arguments, class Result>
  struct Call {
    Ref self;
    Arguments arguments;  // without their tensors, but while they are being copied
    TensorRefs places;    // of these tensors
    std::optional<Result> shape_of_result;
  };

  // The checkpoint hook sees a function from tensors to tensors. Everything else of the arguments is captured
  // by value; how long the tensors live is the hook's to decide.
  template <class Arguments>
  auto call_checkpointed(HookHost& host, Arguments& arguments) const {
    using Result = decltype(call_inner(host, arguments));
    auto call = std::make_shared<Call<Arguments, Result>>(Call<Arguments, Result>{*this, arguments, {}, {}});
    call->places = tensor_refs(call->arguments);
    for (at::Tensor* place : call->places) place->reset();
    auto run = [call](const TensorList& inputs) {
      HookHost& host = call->self.impl();
      DepthGuard entered(host);
      replace_tensors(call->places, inputs);
      Arguments values = call->arguments;
      for (at::Tensor* place : call->places) place->reset();
      Result result = call->self.call_inner(host, values);
      TensorList outputs = tensor_values(tensor_refs(result));
      if (!call->shape_of_result) call->shape_of_result = std::move(result);
      return outputs;
    };
    TensorList outputs = host.checkpoint_hook->call(host, tensor_values(tensor_refs(arguments)), run);
    Result result = std::move(*call->shape_of_result);
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

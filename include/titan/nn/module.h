#pragma once

// nn::Module: torch::nn::Module that can be wrapped, built deferred, and initialized independently of the
// layout.

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "titan/core/error.h"
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

// Finds the tensors among a call's arguments or results: at::Tensor, std::optional, std::vector, std::pair
// and std::tuple of them, nested. A struct joins by a member `template <class F> void for_each_tensor(F&&)`.

namespace detail {

inline void collect(TensorRefs& refs, at::Tensor& tensor) {
  if (tensor.defined()) refs.push_back(&tensor);
}
template <class T>
void collect(TensorRefs& refs, std::optional<T>& value);
template <class T>
void collect(TensorRefs& refs, std::vector<T>& values);
template <class... Ts>
void collect(TensorRefs& refs, std::tuple<Ts...>& values);
template <class A, class B>
void collect(TensorRefs& refs, std::pair<A, B>& values);
template <class T>
void collect(TensorRefs& refs, T& value) {
  if constexpr (requires { value.for_each_tensor([](at::Tensor&) {}); })
    value.for_each_tensor([&](at::Tensor& tensor) { collect(refs, tensor); });
}

template <class T>
void collect(TensorRefs& refs, std::optional<T>& value) {
  if (value) collect(refs, *value);
}
template <class T>
void collect(TensorRefs& refs, std::vector<T>& values) {
  for (auto&& value : values) {
    if constexpr (std::is_lvalue_reference_v<decltype(value)>) collect(refs, value);
  }
}
template <class... Ts>
void collect(TensorRefs& refs, std::tuple<Ts...>& values) {
  std::apply([&](auto&... each) { (collect(refs, each), ...); }, values);
}
template <class A, class B>
void collect(TensorRefs& refs, std::pair<A, B>& values) {
  collect(refs, values.first);
  collect(refs, values.second);
}

}  // namespace detail

template <class T>
TensorRefs tensor_refs(T& value) {
  TensorRefs refs;
  detail::collect(refs, value);
  return refs;
}

inline TensorList tensor_values(const TensorRefs& refs) {
  TensorList values;
  values.reserve(refs.size());
  for (at::Tensor* tensor : refs) values.push_back(*tensor);
  return values;
}

inline void replace_tensors(const TensorRefs& refs, const TensorList& values) {
  TITAN_INTERNAL_ASSERT(refs.size() == values.size(), "a call has ", refs.size(), " tensors, ", values.size(),
                        " came back");
  for (size_t i = 0; i < values.size(); ++i) *refs[i] = values[i];
}

// nn::Ref<Impl>: LibTorch's ModuleHolder whose call operator runs the module's hooks around forward.

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

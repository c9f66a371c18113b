#pragma once

// nn::Module and nn::Ref: LibTorch's modules and holders, extended so that they can be wrapped, constructed
// deferred, and initialized independently of the layout.
//
//   class ScaleImpl : public nn::Module {
//    public:
//     explicit ScaleImpl(int64_t dim, const Construct& construct = {}) {
//       weight = register_init_parameter("weight", {dim}, nn::Init::constant(1), construct);
//     }
//     at::Tensor forward(const at::Tensor& x) { return x * weight; }
//     at::Tensor weight;
//   };
//   TITAN_MODULE(Scale);  // Scale scale(8); y = scale(x);

#include <optional>
#include <tuple>
#include <type_traits>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "titan/core/error.h"
#include "titan/nn/hooks.h"

namespace titan::nn {

namespace detail {

// Impl as a hookable module whose to() and clone() refuse to replace parameters that a wrapper holds.
template <class Impl>
class GuardedModule : public Impl, public HookHost {
 public:
  using Impl::Impl;
  torch::nn::Module& as_module() override { return *this; }

  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override {
    check_movable();
    Impl::to(device, dtype, non_blocking);
  }
  void to(torch::Dtype dtype, bool non_blocking = false) override {
    check_movable();
    Impl::to(dtype, non_blocking);
  }
  void to(torch::Device device, bool non_blocking = false) override {
    check_movable();
    Impl::to(device, non_blocking);
  }
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override {
    this->refuse_if_wrapped("clone");
    return Impl::clone(device);
  }

 protected:
  virtual void check_movable() const { this->refuse_if_wrapped("to"); }
};

}  // namespace detail

/// LibTorch's own module as a hookable one: `Ref<Hooked<torch::nn::LinearImpl>>`. Once wrapped, its forward
/// can be called only through Ref. torch::nn::Sequential doesn't accept it at all (use nn::Sequential).
template <class Impl>
class Hooked : public detail::GuardedModule<Impl> {
 public:
  using detail::GuardedModule<Impl>::GuardedModule;

  template <class... Args>
  auto forward(Args&&... args) -> decltype(std::declval<Impl&>().forward(std::forward<Args>(args)...)) {
    this->check_entered_through_ref();
    return Impl::forward(std::forward<Args>(args)...);
  }
};

/// Base of hookable modules. Your own Impl may instead inherit `torch::nn::Module, HookHost` and define
/// as_module().
class Module : public detail::GuardedModule<torch::nn::Module> {
 public:
  using detail::GuardedModule<torch::nn::Module>::GuardedModule;

 protected:
  /// Registers a parameter of these sizes with its distribution. Unless `construct` is deferred, its values
  /// are drawn at once with seed 0 and the local name. materialize() draws deferred ones with the run's seed
  /// and the full name.
  at::Tensor register_init_parameter(const std::string& name, at::IntArrayRef sizes, const Init& init,
                                     const Construct& construct);
  /// Throws Error also for deferred parameters, which have no memory to move.
  void check_movable() const override;
};

namespace detail {

template <class T>
inline constexpr bool is_vector = false;
template <class T>
inline constexpr bool is_vector<std::vector<T>> = true;

// Finds the tensors among a call's arguments or results, also nested in std::optional, std::vector, std::pair
// and std::tuple. A struct is searched if it has a member `template <class F> void for_each_tensor(F&&)`.
template <class T>
void collect(TensorRefs& refs, T& value) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    if (value.defined()) refs.push_back(&value);
  } else if constexpr (requires { value.for_each_tensor([](at::Tensor&) {}); }) {
    value.for_each_tensor([&](at::Tensor& tensor) { collect(refs, tensor); });
  } else if constexpr (requires { value.has_value(); }) {
    if (value.has_value()) collect(refs, *value);
  } else if constexpr (requires { std::tuple_size<T>::value; }) {
    std::apply([&](auto&... each) { (collect(refs, each), ...); }, value);
  } else if constexpr (is_vector<T>) {
    for (auto&& each : value) {
      if constexpr (std::is_lvalue_reference_v<decltype(each)>) collect(refs, each);
    }
  }
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
  TITAN_INTERNAL_ASSERT(refs.size() == values.size(), "expected ", refs.size(), " tensors, got ",
                        values.size());
  for (size_t i = 0; i < values.size(); ++i) *refs[i] = values[i];
}

/// LibTorch's ModuleHolder whose call operator runs the module's hooks around forward ([Note: hook slots]).
template <class Impl>
class Ref : public torch::nn::ModuleHolder<Impl> {
 public:
  using torch::nn::ModuleHolder<Impl>::ModuleHolder;

  /// Calls forward through the hook slots. Arguments are copied if a hook may replace them. Inlined, so that
  /// stack traces show the modules' forwards without a frame of this handle between them.
  template <class... Args>
  [[gnu::always_inline]] auto operator()(Args&&... args) const {
    HookHost& host = impl();
    DepthGuard entered(host);
    if (!host.is_wrapped() && !host.label_hook) return impl().forward(std::forward<Args>(args)...);
    auto arguments = std::tuple<std::decay_t<Args>...>(std::forward<Args>(args)...);
    TensorRefs inputs = tensor_refs(arguments);
    if (host.fsdp_hook) host.fsdp_hook->pre_forward(host, inputs);
    if (host.label_hook) host.label_hook->pre_forward(host, inputs);
    auto result = host.checkpoint_hook ? call_checkpointed(host, arguments) : call_inner(host, arguments);
    TensorRefs outputs = tensor_refs(result);
    if (host.label_hook) host.label_hook->post_forward(host, outputs);
    if (host.fsdp_hook) host.fsdp_hook->post_forward(host, outputs);
    return result;
  }

 private:
  // The module of a const holder isn't const.
  Impl& impl() const { return *this->ptr(); }

  struct DepthGuard {
    explicit DepthGuard(HookHost& host) : host(host) { ++host.depth_; }
    ~DepthGuard() { --host.depth_; }
    HookHost& host;
  };

  template <class Arguments>
  [[gnu::always_inline]] auto call_inner(HookHost& host, Arguments& arguments) const {
    if (host.prepare_input_hook) host.prepare_input_hook->pre_forward(host, tensor_refs(arguments));
    auto result = std::apply([this](auto&... values) { return impl().forward(values...); }, arguments);
    if (host.prepare_output_hook) host.prepare_output_hook->post_forward(host, tensor_refs(result));
    return result;
  }

  template <class Arguments, class Result>
  struct Call {
    Ref self;
    Arguments arguments;  // their tensors are empty, except while the arguments are copied
    TensorRefs places;    // points to these tensors
    std::optional<Result> shape_of_result;
  };

  // The checkpoint hook sees a function from tensors to tensors. All other arguments are captured by value;
  // the hook decides how long the tensors live.
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

/// Declares `Name` as the holder of `Name##Impl`. It is a class, not an alias, so that it can be
/// forward-declared and compiler messages stay short.
#define TITAN_MODULE(Name)                           \
  class Name : public ::titan::nn::Ref<Name##Impl> { \
   public:                                           \
    using ::titan::nn::Ref<Name##Impl>::Ref;         \
  }

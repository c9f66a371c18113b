#pragma once

// The interface between operations and activation checkpointing. It keeps some results of a layer's forward,
// so that the recomputation before its backward gets them back instead of computing them again.
//
// [Note: kept outputs]
// C++ has no dispatch modes, so an operation takes part by running its costly part inside kept():
//
//   at::Tensor y = kept(KeptKind::Product, weight, [&] { return products->forward(x, weight); });
//
// The code inside runs below autograd. The operation records its node around it, with the inputs of this run,
// so that a result that was handed back has the same gradients as a computed one. It saves its inputs before
// the call: a recomputation stops at the last saved tensor, so the last operation of a layer never runs
// twice. Collectives may run during the call, but not while a tensor is saved.

#include <tuple>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

namespace titan::ops {

/// In its scope, autograd doesn't record LibTorch's operations and doesn't track views.
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;
template <class Run>
auto below_autograd(const Run& run) {
  BelowAutograd guard;
  return run();
}

/// The kind of an operation, used by a policy's decision.
enum class KeptKind { Product, Attention, ReduceScatter };

/// Decides for each call whether an operation's result is kept. One object per forward of a checkpointed
/// module.
class SavedOutputs {
 public:
  enum class Action {
    Compute,   ///< compute as without checkpointing
    Keep,      ///< compute, then keep() each result
    HandBack,  ///< don't compute: hand_back() returns the kept result
  };

  virtual ~SavedOutputs() = default;
  /// `weight` is the parameter that identifies a Product; otherwise undefined.
  virtual Action next(KeptKind kind, const at::Tensor& weight) = 0;
  virtual void keep(const at::Tensor& output) = 0;
  virtual at::Tensor hand_back() = 0;

  /// This thread's object; null outside of modules that keep some results.
  static SavedOutputs* current();
};

/// Makes `outputs`, which may be null, this thread's current object until the end of the scope.
class ScopedSavedOutputs {
 public:
  explicit ScopedSavedOutputs(SavedOutputs* outputs);
  ~ScopedSavedOutputs();
  ScopedSavedOutputs(const ScopedSavedOutputs&) = delete;
  ScopedSavedOutputs& operator=(const ScopedSavedOutputs&) = delete;

 private:
  SavedOutputs* previous_;
};

/// [Note: dropped tensors]
/// For tensors that a checkpointed module's forward saves, only shapes and dtypes are recorded, because the
/// recomputation saves the tensors again. An operation that would compute a tensor only for its backward may
/// then save a meta tensor of the same shape and dtype instead.
bool saved_tensors_are_dropped();

/// Sets saved_tensors_are_dropped() on this thread until the end of the scope.
class ScopedDroppedTensors {
 public:
  explicit ScopedDroppedTensors(bool dropped);
  ~ScopedDroppedTensors();
  ScopedDroppedTensors(const ScopedDroppedTensors&) = delete;
  ScopedDroppedTensors& operator=(const ScopedDroppedTensors&) = delete;

 private:
  bool previous_;
};

namespace detail {

inline void keep_each(SavedOutputs& outputs, const at::Tensor& result) { outputs.keep(result); }
template <class... Tensors>
void keep_each(SavedOutputs& outputs, const std::tuple<Tensors...>& results) {
  std::apply([&](const auto&... each) { (outputs.keep(each), ...); }, results);
}

inline void hand_back_each(SavedOutputs& outputs, at::Tensor& result) { result = outputs.hand_back(); }
template <class... Tensors>
void hand_back_each(SavedOutputs& outputs, std::tuple<Tensors...>& results) {
  std::apply([&](auto&... each) { ((each = outputs.hand_back()), ...); }, results);
}

}  // namespace detail

/// Returns compute(), or its result from the forward: an at::Tensor or a std::tuple of them, not yet recorded
/// by autograd.
template <class Compute>
auto kept(KeptKind kind, const at::Tensor& weight, const Compute& compute) -> decltype(compute()) {
  SavedOutputs* outputs = SavedOutputs::current();
  const auto action = outputs ? outputs->next(kind, weight) : SavedOutputs::Action::Compute;
  decltype(compute()) result;
  if (action == SavedOutputs::Action::HandBack) {
    detail::hand_back_each(*outputs, result);
    return result;
  }
  result = below_autograd(compute);
  if (action == SavedOutputs::Action::Keep) detail::keep_each(*outputs, result);
  return result;
}

}  // namespace titan::ops

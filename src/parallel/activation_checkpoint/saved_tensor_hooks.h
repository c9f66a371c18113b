#pragma once

// Hooks for the tensors that autograd saves: the C++ side of PyTorch's saved-tensor hooks.

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include "ops/saved_outputs.h"

namespace torch::nn {
class Module;
}

namespace titan::activations {

using torch::autograd::SavedVariableHooks;

/// [Note: saved tensors]
/// LibTorch asks its autograd engine (Engine::get_default_saved_variable_hooks) for a pair of hooks each time
/// any operation saves a tensor. Python's engine returns the hooks pushed in Python, the C++ engine none.
/// Our engine is the C++ one, except that it returns the hooks of the thread's innermost HooksScope. So a
/// checkpoint works like PyTorch's non-reentrant one: the forward records its graph as usual, only without
/// the tensors, and no backward runs inside the backward.
class SavedTensorHooks {
 public:
  virtual ~SavedTensorHooks() = default;
  /// Makes the hooks for a tensor that is about to be saved. The engine may drop them without using them.
  virtual std::unique_ptr<SavedVariableHooks> make() = 0;
  /// Whether the hooks record only shapes and dtypes ([Note: dropped tensors] in ops/saved_outputs.h).
  virtual bool drop_tensors() const { return false; }
};

/// Installs `hooks` for this thread until the end of the scope; null saves tensors as they are.
class HooksScope {
 public:
  explicit HooksScope(SavedTensorHooks* hooks);
  ~HooksScope();
  HooksScope(const HooksScope&) = delete;
  HooksScope& operator=(const HooksScope&) = delete;

 private:
  SavedTensorHooks* previous_;
  ops::ScopedDroppedTensors dropping_;
};

/// Installs our engine, once per process. Throws Error if another engine is in use (Python's, in a process
/// that imported torch). No backward may be running.
void install_saved_tensor_hooks();

/// A tensor with the same memory and version counter, but no autograd history.
at::Tensor without_graph(const at::Tensor& tensor);

/// The storages of a module's parameters and buffers, which don't count as activations when a graph saves
/// them. A sharded parameter keeps its storage object while its memory is freed and allocated.
class ParameterStorages {
 public:
  ParameterStorages() = default;
  enum class Buffers { With, Without };
  explicit ParameterStorages(const torch::nn::Module& module, Buffers buffers = Buffers::With);
  bool contains(const at::Tensor& tensor) const;

 private:
  std::vector<const c10::StorageImpl*> storages_;  // sorted
};

}  // namespace titan::activations

#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "parallel/activation_checkpoint/kept_outputs.h"
#include "parallel/activation_checkpoint/saved_tensor_hooks.h"
#include "titan/nn/hooks.h"
#include "titan/parallel/activation_checkpoint.h"

namespace titan::activations {

/// The state of LibTorch's default generators of the CPU and of `device`.
class RngState {
 public:
  explicit RngState(at::Device device);
  /// False when something has drawn from one of them since.
  bool is_current() const;
  void restore() const;

 private:
  struct Entry {
    at::Generator generator;
    at::Tensor state;
  };
  std::vector<Entry> entries_;
};

/// Sets the generators back to `state` (null: leaves them alone) and, at the end, to where they stood.
class ScopedRngState {
 public:
  ScopedRngState(const RngState* state, at::Device device);
  ~ScopedRngState();
  ScopedRngState(const ScopedRngState&) = delete;
  ScopedRngState& operator=(const ScopedRngState&) = delete;

 private:
  std::unique_ptr<const RngState> outer_;
};

/// The inputs of a checkpointed module, for the calls that repeat it. Kept as any tensor that autograd
/// saves: a checkpoint around this one may compute them again in its turn.
class ModuleInputs {
 public:
  /// `module`: its name, for errors; outlives this.
  ModuleInputs(const nn::TensorList& inputs, const std::string& module);
  /// The forward is over. Throws Error when it has written to one of `inputs`, which are those of the
  /// constructor, and lets go of them: a written input may own the graph that owns this.
  void check_unwritten(const nn::TensorList& inputs);
  /// Leaves of the same values. Throws Error when one was written to since.
  nn::TensorList detached() const;

 private:
  struct Input {
    torch::autograd::SavedVariable saved;
    int64_t version;
  };
  [[noreturn]] void refuse_written(size_t number) const;

  std::vector<Input> inputs_;
  const std::string& module_;
};

/// The device on which a module computes: that of the first input that isn't in host memory (token ids may
/// be).
at::Device compute_device(const nn::TensorList& inputs);

// One forward of a checkpointed module whose saved tensors are computed again.

/// Observes a frame, to measure sizes and times.
class FrameObserver {
 public:
  virtual ~FrameObserver() = default;
  /// For the forward, if the frame keeps no outputs itself; null: none.
  virtual ops::SavedOutputs* outputs() = 0;
  virtual void saved(const at::Tensor& tensor) = 0;
  virtual void recomputing() = 0;
  virtual void recomputed() = 0;
};

/// [Note: recomputation]
/// Each tensor that the forward saves becomes a slot: its number in the order of saving, with its shape and
/// dtype. Nodes of the graph own their slots through the hooks that LibTorch keeps instead of the tensor; the
/// hooks own the frame, and the frame owns the module's inputs. The first node that unpacks a slot makes the
/// frame run the module again: the i-th tensor saved by that run fills slot i. A slot returns its tensor
/// once; unpacking it again, or another backward, recomputes. Slots of destroyed nodes stay empty. When the
/// last slot of a living node is filled, an exception (EarlyStop) ends the run where the tensor would be
/// saved: everything it passes is C++ with destructors.
///
/// With hooks, LibTorch doesn't check whether a saved tensor was written to, so the frame does: the inputs
/// when the forward ends and before it is repeated, a slot when it is unpacked.
class RecomputeFrame final : public SavedTensorHooks, public std::enable_shared_from_this<RecomputeFrame> {
 public:
  struct Parts {
    std::shared_ptr<ProductChoice> products;  ///< null: no results are kept
    std::shared_ptr<FrameObserver> observer;  ///< may be null
  };

  /// `host` is kept alive by `run`.
  RecomputeFrame(nn::HookHost& host, const nn::TensorList& inputs, nn::CheckpointHook::Run run,
                 const ActivationCheckpointOptions& options, const Parts& parts);
  nn::TensorList forward(const nn::TensorList& inputs);
  std::unique_ptr<SavedVariableHooks> make() override;
  bool drop_tensors() const override { return true; }

 private:
  class SlotHooks;
  class RefillHooks;
  class Refill;
  class Recomputing;
  /// A std::exception, as those are what LibTorch's engine carries out of a backward that the module holds.
  struct EarlyStop final : std::exception {
    explicit EarlyStop(const RecomputeFrame* frame) : frame(frame) {}
    const char* what() const noexcept override {
      return "the recompute of a checkpointed module has all that the backward needs, and ends here";
    }
    const RecomputeFrame* frame;
  };
  struct Slot {
    at::DimVector sizes;
    at::ScalarType dtype;
    at::Tensor value;  // computed again and not asked for yet
    bool alive = true;
    int64_t version = 0;  // of the value when it was saved
  };

  size_t add_slot(const at::Tensor& tensor);
  at::Tensor take(size_t slot);
  void abandon(size_t slot);
  void recompute();
  void check_complete() const;
  void run_again();
  at::Tensor refill(const at::Tensor& tensor);
  void check_slot(size_t slot, const at::Tensor& tensor) const;
  void find_last_needed();

  nn::HookHost& host_;
  nn::CheckpointHook::Run run_;
  ActivationCheckpointOptions options_;
  std::shared_ptr<FrameObserver> observer_;
  at::Device device_;
  ModuleInputs inputs_;
  c10::impl::LocalDispatchKeySet forward_keys_ = c10::impl::tls_local_dispatch_key_set();
  std::unique_ptr<RngState> rng_state_;
  std::unique_ptr<KeptOutputs> kept_;

  // Guards the slots: nodes of two devices run on two threads. Recursive, as a module that keeps a tensor of
  // its forward lets go of it in the recompute, and with it of nodes that own slots.
  std::recursive_mutex mutex_;
  bool recomputing_ = false, forward_ended_ = false;
  std::vector<Slot> slots_;
  size_t num_slots_ = 0;
  int64_t num_needed_ = 0;  // slots up to the last one that is waited for
  size_t num_refilled_ = 0;
  int backward_ = -1;  // the engine's number of the one that the values are of
};

/// FullRecompute, or with `products` SelectiveOp.
class RecomputeHook final : public nn::CheckpointHook {
 public:
  explicit RecomputeHook(const ActivationCheckpointOptions& options,
                         std::shared_ptr<ProductChoice> products = nullptr)
      : options_(options), products_(std::move(products)) {}
  nn::TensorList call(nn::HookHost& host, const nn::TensorList& inputs, Run run) override;

 private:
  ActivationCheckpointOptions options_;
  std::shared_ptr<ProductChoice> products_;
};

}  // namespace titan::activations

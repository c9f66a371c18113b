#pragma once

// One forward of a checkpointed module whose saved tensors are computed again.

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "parallel/activation_checkpoint/kept_outputs.h"
#include "parallel/activation_checkpoint/rng_state.h"
#include "parallel/activation_checkpoint/saved_tensor_hooks.h"
#include "titan/nn/hooks.h"
#include "titan/parallel/activation_checkpoint.h"

namespace titan::activations {

/// Told of what a frame does, where sizes and times are measured.
class FrameObserver {
 public:
  virtual ~FrameObserver() = default;
  /// The forward's, where the frame keeps none itself; null: nobody is asked.
  virtual ops::SavedOutputs* outputs() = 0;
  virtual void saved(const at::Tensor& tensor) = 0;
  virtual void recomputing() = 0;
  virtual void recomputed() = 0;
};

/// [Note: recomputation]
/// Each tensor that the forward saves becomes a slot: its number in the order of saving, and what it looked
/// like. Nodes of the graph own their slots through the hooks that LibTorch keeps in the tensor's place; the
/// hooks own the frame, and the frame the module's inputs. The first node that asks for a slot makes the
/// frame run the module again: the i-th tensor saved by that run is slot i. A slot hands its tensor over
/// once; the next question, or another backward, recomputes anew. Slots whose node is gone aren't filled, and
/// when the last one of a living node is, the run is ended by an exception (EarlyStop) thrown where the
/// tensor would have been saved: everything between is C++ with destructors.
class RecomputeFrame final : public SavedTensorHooks, public std::enable_shared_from_this<RecomputeFrame> {
 public:
  struct Parts {
    std::shared_ptr<ProductChoice> products;  ///< null: no results are kept
    std::shared_ptr<FrameObserver> observer;  ///< may be null
  };

  /// `host` is kept alive by `run`.
  RecomputeFrame(nn::HookHost& host, const nn::TensorList& inputs, nn::CheckpointHook::Run run,
                 const CheckpointOptions& options, const Parts& parts);
  nn::TensorList forward(const nn::TensorList& inputs);
  std::unique_ptr<SavedVariableHooks> make() override;

 private:
  class SlotHooks;
  class RefillHooks;
  class Refill;
  struct EarlyStop {
    const RecomputeFrame* frame;
  };
  struct Slot {
    at::DimVector sizes;
    at::ScalarType dtype;
    at::Tensor value;  // computed again and not asked for yet
    bool alive = true;
  };

  size_t add_slot(const at::Tensor& tensor);
  at::Tensor take(size_t slot);
  void abandon(size_t slot);
  void recompute();
  void run_again();
  at::Tensor refill(const at::Tensor& tensor);
  void check_slot(size_t slot, const at::Tensor& tensor) const;
  void find_last_needed();
  nn::TensorList detached_inputs() const;

  nn::HookHost& host_;
  nn::CheckpointHook::Run run_;
  CheckpointOptions options_;
  std::shared_ptr<FrameObserver> observer_;
  at::Device device_;
  std::vector<torch::autograd::SavedVariable> inputs_;
  c10::impl::LocalDispatchKeySet forward_keys_ = c10::impl::tls_local_dispatch_key_set();
  std::unique_ptr<RngState> rng_state_;
  std::unique_ptr<KeptOutputs> kept_;

  std::mutex mutex_;  // of the slots: nodes of two devices run on two threads
  std::vector<Slot> slots_;
  size_t num_slots_ = 0;
  int64_t num_needed_ = 0;  // slots up to the last one that is waited for
  size_t num_refilled_ = 0;
  int backward_ = -1;  // the engine's number of the one that the values are of
};

}  // namespace titan::activations

#pragma once

// FullRecompute and SelectiveOp: recomputing the tensors that a layer's forward saves, and choosing the
// results that it keeps.

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ops/saved_outputs.h"
#include "parallel/activation_checkpoint/saved_tensor_hooks.h"
#include "titan/nn/hooks.h"
#include "titan/parallel/activation_checkpoint.h"

namespace titan::activations {

/// Every second product of one layer. [Note: every second product]
/// TorchTitan counts the products of a layer as they run and keeps the 1st, 3rd, 5th and so on. Here modules
/// are numbered in the order in which the layer's first forward calls them, so forwards that take different
/// paths still keep the same modules' results. A weight identifies its module, because it stays the same
/// tensor object.
class ProductChoice {
 public:
  /// Throws Error when a name of the policy matches a module without a product.
  ProductChoice(const nn::AnyRef& layer, const SelectiveOp& policy);
  bool keeps(const at::Tensor& weight);

 private:
  struct Product {
    const c10::TensorImpl* weight;
    bool recomputed;  // chosen by name; has no number
    int number = -1;  // none yet
  };
  std::vector<Product> products_;
  int num_numbered_ = 0;
};

/// The device on which a module computes: the device of the first input outside host memory. (Token ids may
/// be in host memory.)
at::Device compute_device(const nn::TensorList& inputs);

/// Observes a forward that is computed again, to measure sizes and times.
class FrameObserver {
 public:
  virtual ~FrameObserver() = default;
  /// The outputs to record in a forward that keeps none itself; may be null.
  virtual ops::SavedOutputs* outputs() = 0;
  virtual void saved(const at::Tensor& tensor) = 0;
  virtual void recomputing() = 0;
  virtual void recomputed() = 0;
};

struct RecomputeParts {
  /// The module's. Graphs hold them anyway, so nodes keep them, and a recomputation needn't reach the operation that reads one.
  std::shared_ptr<const ParameterStorages> parameters;
  std::shared_ptr<ProductChoice> products;  ///< null: no results are kept
  std::shared_ptr<FrameObserver> observer;  ///< may be null
};

/// Runs a forward of a checkpointed module by run(inputs); the tensors that it saves are recomputed in the
/// backward. `run` keeps `host` alive.
nn::TensorList forward_to_recompute(nn::HookHost& host, const nn::TensorList& inputs,
                                    nn::CheckpointHook::Run run, const ActivationCheckpointOptions& options,
                                    const RecomputeParts& parts);

/// FullRecompute; with `products`, SelectiveOp.
class RecomputeHook final : public nn::CheckpointHook {
 public:
  explicit RecomputeHook(const ActivationCheckpointOptions& options,
                         std::shared_ptr<ProductChoice> products = nullptr)
      : options_(options), products_(std::move(products)) {}
  nn::TensorList call(nn::HookHost& host, const nn::TensorList& inputs, Run run) override;

 private:
  ActivationCheckpointOptions options_;
  std::shared_ptr<ProductChoice> products_;
  std::shared_ptr<const ParameterStorages> parameters_;  // from the first forward on
};

}  // namespace titan::activations

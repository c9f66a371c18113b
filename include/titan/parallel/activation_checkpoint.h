#pragma once

// Activation checkpointing: the activations that a module keeps between its forward and its backward. All
// policies give bitwise equal results; they trade memory for time.
//
//   for (auto& layer : model->layers) titan::checkpoint_activations(layer, titan::SelectiveOp{});
//
// The hook is inside FSDP's and outside those of tensor and context parallelism (nn/hooks.h): a recompute
// runs with gathered parameters and repeats these parallelisms' collectives, in the same order on all ranks.
// The forward's graph stays, so gradients are computed as usual. Only the tensors that the graph would keep
// are dropped, and recomputed when its first node needs one (PyTorch's non-reentrant checkpoint;
// docs/activation_checkpointing.md). A forward without gradients is left alone.

#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "titan/dist/collectives.h"
#include "titan/nn/hooks.h"

namespace titan {

/// Keeps the module's inputs and recomputes everything else.
struct FullRecompute {};

/// Keeps, besides the inputs, the results of attention, of tensor parallelism's reduce-scatters, and of every
/// second product: wq, wv, w1 and w2 of Llama's wq, wk, wv, wo, w1, w3, w2. Products are counted by module,
/// in the order of the layer's first forward. Only the products of nn::Linear are counted and kept.
struct SelectiveOp {
  /// Linear modules whose dotted name contains one of these are recomputed and not counted.
  std::vector<std::string> recompute_products = {};
};

/// Copies saved tensors to page-locked host memory during the forward, and back one layer before they are
/// used. Nothing is recomputed. GPUs only.
struct OffloadActivations {
  int64_t min_bytes = 1 << 20;  ///< smaller tensors stay on the device
  int64_t layers_kept = 1;      ///< the last layers stay on the device, because they are needed at once
};

/// FullRecompute for every n-th layer of a list: n = 2 means the 2nd, the 4th and so on.
struct SelectiveLayers {
  int64_t n = 2;
};

/// Chooses for each layer between keeping everything, SelectiveOp and FullRecompute, so that the kept tensors
/// fit the budget and recomputation takes the least time. Sizes and times are measured while the first step
/// runs with FullRecompute; the choice is printed as a table. The layers that keep more are the last ones,
/// whose memory is freed before the first ones recompute.
struct MemoryBudget {
  int64_t bytes = -1;  ///< limit for all layers together, for one forward; -1: use `fraction`
  /// The limit as a position between FullRecompute of all layers (0) and keeping everything (1).
  double fraction = 0.5;
  /// Ranks of this group agree on one choice; null: each rank chooses for itself. Required if a recompute
  /// contains collectives.
  std::shared_ptr<dist::Group> group = nullptr;
  SelectiveOp op = {};  ///< the policy for layers at the middle level
};

struct ActivationCheckpointOptions {
  bool early_stop = true;  ///< stop a recompute after the last tensor that the backward needs
  /// Restore the state of LibTorch's default generators, so that the recompute draws the forward's numbers.
  bool preserve_rng_state = true;
  bool check_recompute = true;  ///< recomputed tensors must have the forward's shapes and dtypes
};

using ModulePolicy = std::variant<FullRecompute, SelectiveOp, OffloadActivations>;
using LayersPolicy =
    std::variant<FullRecompute, SelectiveOp, OffloadActivations, SelectiveLayers, MemoryBudget>;

/// Call it before the first forward, before or after other wrappers. Throws Error for a module that is
/// checkpointed already, and for OffloadActivations on a CPU.
void checkpoint_activations(const nn::AnyRef& module, const ModulePolicy& policy,
                            const ActivationCheckpointOptions& options = {});

/// For a model's layers, in the order of their calls. `first_number` is the first layer's position in the
/// whole model, because a pipeline stage has only some of the layers.
void checkpoint_activations(const std::vector<nn::AnyRef>& layers, const LayersPolicy& policy,
                            const ActivationCheckpointOptions& options = {}, int64_t first_number = 0);

/// True when a module at or below `root` is checkpointed.
bool checkpoints_activations(const nn::AnyRef& root);

}  // namespace titan

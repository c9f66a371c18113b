#pragma once

// Activation checkpointing: what a module keeps between its forward and its backward. All policies give the
// same bits; they trade memory for time.
//
//   for (auto& layer : model->layers) titan::checkpoint_activations(layer, titan::SelectiveOp{});
//
// The hook lies inside FSDP's slot and outside tensor and context parallelism's (nn/hooks.h): a recompute
// runs with gathered parameters and repeats their collectives, in the same order on all ranks. The graph of
// the forward stays, so gradients take the same way as without; only the tensors that it would keep are
// computed again when its first node asks for one (PyTorch's non-reentrant kind;
// docs/activation_checkpointing.md). A forward without gradients is left alone.

#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "titan/dist/collectives.h"
#include "titan/nn/hooks.h"

namespace titan {

/// Keeps the module's inputs; everything else is computed again.
struct FullRecompute {};

/// Keeps, beside the inputs, the results of attention, of tensor parallelism's reduce-scatters, and of every
/// second product: of Llama's wq, wk, wv, wo, w1, w3, w2 those of wq, wv, w1 and w2. Products are counted by
/// module, in the order of the layer's first forward; a module outside of nn::Linear isn't counted or kept.
struct SelectiveOp {
  /// Linear modules whose dotted name contains one of these: computed again, and not counted.
  std::vector<std::string> recompute_products = {};
};

/// Copies saved tensors to page-locked host memory during the forward, and back one layer ahead of their use;
/// nothing is recomputed. GPUs only.
struct OffloadActivations {
  int64_t min_bytes = 1 << 20;  ///< smaller ones stay
  int64_t layers_kept = 1;      ///< this many last layers stay on the device: they are needed at once
};

/// FullRecompute for every n-th layer of a list: n = 2 takes the 2nd, the 4th and so on, by its number.
struct SelectiveLayers {
  int64_t n = 2;
};

/// Chooses for each layer between keeping all, SelectiveOp and FullRecompute, so that the kept tensors fit
/// the budget and recomputation takes the least time. Sizes and times are measured while the first step runs
/// with FullRecompute; the choice is printed as a table. The keeping layers are the last ones, whose memory
/// is free again when the first ones recompute.
struct MemoryBudget {
  int64_t bytes = -1;     ///< of all layers together, for one forward; -1: by `fraction`
  double fraction = 0.5;  ///< of the way from FullRecompute of all layers (0) to keeping everything (1)
  /// Its ranks agree on one choice; null: every rank chooses for itself. Required where a recompute contains
  /// collectives.
  std::shared_ptr<dist::Group> group = nullptr;
  SelectiveOp op = {};  ///< the policy for layers at the middle level
};

struct ActivationCheckpointOptions {
  bool early_stop = true;  ///< a recompute ends with the last tensor that the backward needs
  bool preserve_rng_state =
      true;  ///< of LibTorch's default generators: the recompute draws the forward's numbers
  bool check_recompute = true;  ///< recomputed tensors must have the forward's shapes and dtypes
};

using ModulePolicy = std::variant<FullRecompute, SelectiveOp, OffloadActivations>;
using LayersPolicy =
    std::variant<FullRecompute, SelectiveOp, OffloadActivations, SelectiveLayers, MemoryBudget>;

/// Before or after other wrappers, before the first forward. Throws Error for a module that is wrapped
/// already, and for OffloadActivations on a CPU.
void checkpoint_activations(const nn::AnyRef& module, const ModulePolicy& policy,
                            const ActivationCheckpointOptions& options = {});

/// The layers of a model in the order of their calls; `first_number` is the first one's position in the whole
/// model (a pipeline stage has a part of them).
void checkpoint_activations(const std::vector<nn::AnyRef>& layers, const LayersPolicy& policy,
                            const ActivationCheckpointOptions& options = {}, int64_t first_number = 0);

/// True when a module at or below `root` is checkpointed.
bool checkpoints_activations(const nn::AnyRef& root);

}  // namespace titan

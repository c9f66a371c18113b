#pragma once

// The modules of each pipeline stage. Plain data, no tensors.
//
// split_evenly() follows TorchTitan: layers are divided evenly, and the embedding and the head count for some
// of them (distributed/pipeline_parallel.py, generate_llm_fqn_per_model_part). split_by_lists() takes the
// split as lists of names, and split_balanced() computes it from the modules' costs.

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "titan/parallel/pipeline_schedule.h"

namespace titan::pipeline {

/// A model's modules in the order of their calls.
struct ModuleSequence {
  std::vector<std::string> before;  ///< modules before the layers: "tok_embeddings"
  std::vector<std::string> layers;  ///< "layers.0", "layers.1", ...
  std::vector<std::string> after;   ///< modules after the layers: "norm", "output"

  std::vector<std::string> names() const;
};

/// The modules of each stage, in call order. A stage without layers is legal, one without modules isn't.
using StageModules = std::vector<std::vector<std::string>>;

/// The weight of the modules before and after the layers, in layers.
struct EndWeights {
  int64_t first = 1;  ///< pipeline_parallel_first_stage_less_layers
  int64_t last = 1;   ///< pipeline_parallel_last_stage_less_layers
};

/// The number of stages for this many layers per stage: ceil((layers + ends) / layers_per_stage).
/// counts_problem() checks whether schedule and ranks allow that number.
int count_stages(int64_t num_layers, EndWeights ends, int64_t layers_per_stage);

/// TorchTitan's rule: layers, plus the weights of the ends, are divided evenly, with one more for the first
/// stages if there is a remainder; then the ends' weights are subtracted from the first and the last stage. A
/// single stage takes everything. Throws ConfigError for less than one stage, more stages than layers and
/// weights together, or ends that weigh more than one stage's share.
StageModules split_evenly(const ModuleSequence& sequence, int num_stages, EndWeights ends = {});

/// The split given by `lists`. Throws ConfigError with all problems: unknown modules (with the nearest name);
/// duplicate, missing or misordered modules; stages without modules.
StageModules split_by_lists(const ModuleSequence& sequence, const StageModules& lists);

/// "tok_embeddings, layers.0..7": names in call order, runs of layers abbreviated.
std::string short_list(const std::vector<std::string>& modules);

// A split into stages of equal time, from each module's cost.
//
// A pipeline is as fast as its slowest stage, so the split minimizes the time of the slowest stage's forward
// and backward. The stages of one rank share its memory.

/// The cost of one module of a sequence on one rank.
struct ModuleCost {
  double forward_s = 0;         ///< per micro-batch
  double backward_s = 0;        ///< per micro-batch, with recomputation
  double fixed_bytes = 0;       ///< parameters, gradients and optimizer state
  double activation_bytes = 0;  ///< kept from forward to backward, per micro-batch

  double time_s() const { return forward_s + backward_s; }
};

struct BalanceOptions {
  std::vector<int> rank_of_stage;                                 ///< loop_stage_map() or v_stage_map()
  double memory_bytes = std::numeric_limits<double>::infinity();  ///< limit of a rank for all its stages
  /// The most micro-batches between F and B: one value per stage, or one for all.
  std::vector<double> live_micro_batches = {1};
};

/// The most micro-batches that each stage holds under a schedule, from their F to the end of their B or W.
std::vector<double> live_micro_batches(const Schedule& schedule);

/// The number of modules of each stage, at least 1: a split that fits in every rank's memory and minimizes
/// the time of the slowest stage. If memory doesn't limit it, it also has the least sum of squared times
/// among these. Exact. Without a binding limit this takes stages x modules^2 steps. With one, the number of
/// states grows as modules^(2 x stages of a rank - 1), less those that the limits on time and memory rule
/// out. Throws ConfigError if there is no such split.
std::vector<int> balanced_counts(const std::vector<ModuleCost>& costs, const BalanceOptions& options);

/// As above, but returns the modules' names. `costs` are in the order of sequence.names().
StageModules split_balanced(const ModuleSequence& sequence, const std::vector<ModuleCost>& costs,
                            const BalanceOptions& options);

}  // namespace titan::pipeline

#pragma once

// The modules of each pipeline stage. Plain data, no tensors.
//
// The split is TorchTitan's: layers are dealt evenly, the embedding and the head counting for some of them
// (distributed/pipeline_parallel.py, generate_llm_fqn_per_model_part); or it is given as lists, or found by
// split_balanced().

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "titan/parallel/pipeline_schedule.h"

namespace titan::pipeline {

/// A model's modules in the order of their calls.
struct ModuleSequence {
  std::vector<std::string> before;  ///< of the layers: "tok_embeddings"
  std::vector<std::string> layers;  ///< "layers.0", "layers.1", ...
  std::vector<std::string> after;   ///< "norm", "output"

  std::vector<std::string> names() const;
};

/// The modules of each stage, in call order. A stage without layers is legal, one without modules isn't.
using StageModules = std::vector<std::vector<std::string>>;

/// The weight of the modules before and after the layers, in layers.
struct EndWeights {
  int64_t first = 1;  ///< pipeline_parallel_first_stage_less_layers
  int64_t last = 1;   ///< pipeline_parallel_last_stage_less_layers
};

/// The stages of a model with so many layers on each: ceil((layers + ends) / layers_per_stage). What schedule
/// and ranks ask of their number is for counts_problem() to say.
int count_stages(int64_t num_layers, EndWeights ends, int64_t layers_per_stage);

/// TorchTitan's rule: layers, plus the weights of the ends, are divided evenly, with one more for the first
/// stages where there is a remainder; then the ends' weights are subtracted from the first and the last
/// stage. A single stage takes everything. Throws ConfigError for less than one stage, more stages than
/// layers and weights, or ends that weigh more than a share.
StageModules split_evenly(const ModuleSequence& sequence, int num_stages, EndWeights ends = {});

/// The split given by `lists`. Throws ConfigError with all problems: unknown modules (with the nearest name),
/// modules that are duplicate, missing or out of order, stages without modules.
StageModules split_by_lists(const ModuleSequence& sequence, const StageModules& lists);

/// "tok_embeddings, layers.0..7": names in call order, runs of layers short.
std::string short_list(const std::vector<std::string>& modules);

// A split into stages that take the same time, from what each module costs.
//
// A pipeline is as fast as its slowest stage, so the split minimizes the largest stage's forward and
// backward. The stages of one rank share its memory.

/// The cost of one module of a sequence on one rank.
struct ModuleCost {
  double forward_s = 0;         ///< of one micro-batch
  double backward_s = 0;        ///< of one micro-batch, with what is computed again
  double fixed_bytes = 0;       ///< parameters, gradients, the optimizer's state
  double activation_bytes = 0;  ///< what a micro-batch keeps from its forward to its backward

  double time_s() const { return forward_s + backward_s; }
};

struct BalanceOptions {
  std::vector<int> rank_of_stage;                                 ///< loop_stage_map() or v_stage_map()
  double memory_bytes = std::numeric_limits<double>::infinity();  ///< that a rank has for all its stages
  std::vector<double> live_micro_batches = {1};  ///< at most, between F and B: of each stage, or one for all
};

/// How many micro-batches each stage holds at most under a schedule, from their F to the end of their B or W.
std::vector<double> live_micro_batches(const Schedule& schedule);

/// The number of modules of each stage, none of which is 0: of all splits in which every rank's memory
/// suffices, one whose largest stage takes least; of these, where memory doesn't bind, the one with the least
/// sum of squares. Exact. Without a binding limit in stages x modules^2 steps; with one, the states that are
/// looked at grow with modules^(2 x stages of a rank - 1), but for what the limits on time and memory rule
/// out. Throws ConfigError where there is no such split.
std::vector<int> balanced_counts(const std::vector<ModuleCost>& costs, const BalanceOptions& options);

/// The same as modules; `costs` are in the order of sequence.names().
StageModules split_balanced(const ModuleSequence& sequence, const std::vector<ModuleCost>& costs,
                            const BalanceOptions& options);

}  // namespace titan::pipeline

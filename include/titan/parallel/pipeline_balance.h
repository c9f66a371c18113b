#pragma once

// A split into stages that take the same time, from what each module costs. Plain data, no tensors.
//
// A pipeline goes as fast as its slowest stage, so the largest stage's forward and backward is what is made
// as small as can be. The stages of one rank share its memory.

#include <limits>
#include <vector>

#include "titan/parallel/pipeline_schedule.h"
#include "titan/parallel/pipeline_split.h"

namespace titan::pipeline {

/// Of one module of a sequence, on one rank.
struct ModuleCost {
  double forward_s = 0;         ///< of one micro-batch
  double backward_s = 0;        ///< of one micro-batch, with what is computed again
  double fixed_bytes = 0;       ///< parameters, gradients, the optimizer's state
  double activation_bytes = 0;  ///< what a micro-batch keeps from its forward to its backward

  double time_s() const { return forward_s + backward_s; }
};

struct BalanceOptions {
  std::vector<int> rank_of_stage;  ///< loop_stage_map() or v_stage_map() of pipeline_generators.h
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

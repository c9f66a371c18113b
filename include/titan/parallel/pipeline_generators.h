#pragma once

// Schedules by name. They hold compute actions (F, B, I, W) in PyTorch's order, which tests/data/schedules
// proves; sends, receives and parameter actions are added by pipeline_completion.h.
//
//   GPipe                  all F, then all B (Huang et al. 2019)
//   1F1B                   one F, one B in turn (Narayanan et al. 2019, PipeDream-Flush)
//   Interleaved1F1B        the same over several stages a rank (Narayanan et al. 2021)
//   LoopedBFS              stage after stage, all micro-batches of one at a time (Lamy-Poirier 2022)
//   InterleavedZeroBubble  ZB1P: backward split, W fills the gaps (Qi et al. 2024, arXiv 2401.10241)
//   ZBVZeroBubble          ZB-V: the same on a V of two stages a rank (same paper, section 6)
//   DualPipeV              F of one direction beside B of the other, on a V (DeepSeek-V3, arXiv 2412.19437)

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "titan/parallel/pipeline_schedule.h"

namespace titan::pipeline {

enum class StagesPerRank {
  One,
  Several,  ///< two or more, in a loop
  TwoInV,   ///< exactly two: r and 2p-1-r
};

enum class MicroBatchRule {
  Any,
  AtLeastStages,
  WholeRounds,  ///< a multiple of max(1, micro-batches / ranks): rounds of equal size
};

struct ScheduleTraits {
  std::string_view name;  ///< as PyTorch writes it
  StagesPerRank stages_per_rank = StagesPerRank::One;
  bool splits_backward = false;  ///< has I and W
  /// Live activations grow with the micro-batches, so gradient accumulation should repeat() a short schedule.
  bool memory_grows = false;
  MicroBatchRule micro_batch_rule = MicroBatchRule::Any;
};

/// All of them, in the order above.
const std::vector<ScheduleTraits>& all_schedule_traits();
std::vector<std::string> schedule_names();

/// By name, in any case. Throws ConfigError for an unknown one, with the nearest and all known names.
const ScheduleTraits& schedule_traits(std::string_view name);

/// One stage a rank, or two where the schedule wants several.
int default_num_stages(const ScheduleTraits& traits, int num_ranks);

/// Why the schedule can't have this many stages, and how many would do; nothing when it can.
std::optional<std::string> stages_problem(const ScheduleTraits& traits, int num_ranks, int num_stages);

/// The same of the stages and micro-batches.
std::optional<std::string> counts_problem(const ScheduleTraits& traits, int num_ranks, int num_stages,
                                          int num_micro_batches);

/// Throws ConfigError for an unknown name and for counts that the schedule doesn't take.
Schedule make_schedule(std::string_view name, int num_ranks, int num_stages, int num_micro_batches);

/// Evaluation: every F once, on any map of stages to ranks (every rank owns a stage). A rank prefers the
/// later stage of those that could run, so few inputs wait.
Schedule make_forward_only_schedule(const std::vector<int>& rank_of_stage, int num_micro_batches);

/// Stage s on rank s % num_ranks.
std::vector<int> loop_stage_map(int num_ranks, int num_stages);
/// To and fro: 0 .. p-1, p-1 .. 0, 0 .. p-1, ...
std::vector<int> v_stage_map(int num_ranks, int num_stages);
/// The map that the schedule's generator uses.
std::vector<int> stage_map(const ScheduleTraits& traits, int num_ranks, int num_stages);

/// The schedule `times` times over, micro-batches renumbered: gradient accumulation that needs no more memory
/// than one pass. Of Reduce actions only the last pass's are kept.
Schedule repeat(const Schedule& schedule, int times);

}  // namespace titan::pipeline

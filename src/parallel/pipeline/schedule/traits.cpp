// What is known of each schedule by its name, and the counts that it takes.

#include <algorithm>
#include <cctype>

#include "parallel/pipeline/schedule/generators.h"
#include "titan/core/error.h"
#include "titan/parallel/pipeline_generators.h"

namespace titan::pipeline {

namespace {

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return result;
}

std::string quoted_list(const std::vector<std::string>& names) {
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "'" : ", '") + name + "'";
  return list;
}

bool whole_rounds(int num_ranks, int num_micro_batches) {
  return num_micro_batches %
             Counts{.num_ranks = num_ranks, .num_micro_batches = num_micro_batches}.num_rounds() ==
         0;
}

// The nearest counts that do: below and above.
std::string whole_rounds_nearby(int num_ranks, int num_micro_batches) {
  int below = num_micro_batches, above = num_micro_batches;
  while (!whole_rounds(num_ranks, below)) --below;
  while (!whole_rounds(num_ranks, above)) ++above;
  return str(below, " or ", above);
}

std::optional<std::string> micro_batches_problem(const ScheduleTraits& traits, int num_ranks, int num_stages,
                                                 int num_micro_batches) {
  if (traits.micro_batch_rule == MicroBatchRule::AtLeastStages && num_micro_batches < num_stages)
    return str(traits.name, " over ", num_stages, " stages needs at least ", num_stages,
               " micro-batches, not ", num_micro_batches);
  if (traits.micro_batch_rule == MicroBatchRule::WholeRounds && !whole_rounds(num_ranks, num_micro_batches))
    return str(traits.name, " takes the micro-batches in ", num_micro_batches / num_ranks,
               " rounds (micro-batches / ", num_ranks, " ranks), all of one size: ", num_micro_batches,
               " can't be divided so; ", whole_rounds_nearby(num_ranks, num_micro_batches), " would do");
  return std::nullopt;
}

}  // namespace

const std::vector<ScheduleTraits>& all_schedule_traits() {
  static const std::vector<ScheduleTraits> all = {
      {.name = "GPipe", .memory_grows = true},
      {.name = "1F1B", .micro_batch_rule = MicroBatchRule::AtLeastStages},
      {.name = "Interleaved1F1B",
       .stages_per_rank = StagesPerRank::Several,
       .micro_batch_rule = MicroBatchRule::WholeRounds},
      {.name = "LoopedBFS", .stages_per_rank = StagesPerRank::Several, .memory_grows = true},
      {.name = "InterleavedZeroBubble",
       .stages_per_rank = StagesPerRank::Several,
       .splits_backward = true,
       .micro_batch_rule = MicroBatchRule::WholeRounds},
      {.name = "ZBVZeroBubble", .stages_per_rank = StagesPerRank::TwoInV, .splits_backward = true},
      {.name = "DualPipeV",
       .stages_per_rank = StagesPerRank::TwoInV,
       .splits_backward = true,
       .micro_batch_rule = MicroBatchRule::AtLeastStages},
  };
  return all;
}

std::vector<std::string> schedule_names() {
  std::vector<std::string> names;
  for (const ScheduleTraits& traits : all_schedule_traits()) names.emplace_back(traits.name);
  return names;
}

const ScheduleTraits& schedule_traits(std::string_view name) {
  for (const ScheduleTraits& traits : all_schedule_traits())
    if (lower(traits.name) == lower(name)) return traits;
  const std::vector<std::string> names = schedule_names(), near = nearest_names(name, names, 1);
  throw ConfigError(str("unknown pipeline schedule '", name, "'",
                        near.empty() ? "" : str("; did you mean '", near.front(), "'?"),
                        " (known: ", quoted_list(names), ")"));
}

int default_num_stages(const ScheduleTraits& traits, int num_ranks) {
  return traits.stages_per_rank == StagesPerRank::One ? num_ranks : 2 * num_ranks;
}

std::optional<std::string> stages_problem(const ScheduleTraits& traits, int num_ranks, int num_stages) {
  if (num_ranks < 1) return str("a pipeline has 1 rank or more, not ", num_ranks);
  const auto wants = [&](const std::string& what) {
    return str(traits.name, " wants ", what, "; ", num_stages, num_stages == 1 ? " stage" : " stages", " on ",
               num_ranks, num_ranks == 1 ? " rank" : " ranks", " are something else");
  };
  switch (traits.stages_per_rank) {
    case StagesPerRank::One:
      if (num_stages != num_ranks) return wants(str("one stage a rank, ", num_ranks, " in all"));
      break;
    case StagesPerRank::TwoInV:
      if (num_stages != 2 * num_ranks)
        return wants(str("exactly two stages a rank, ", 2 * num_ranks, " in all"));
      break;
    case StagesPerRank::Several:
      if (num_stages % num_ranks != 0 || num_stages < 2 * num_ranks)
        return wants(str("two or more stages a rank, the same number on each: a multiple of ", num_ranks,
                         " from ", 2 * num_ranks, " on"));
      break;
  }
  return std::nullopt;
}

std::optional<std::string> counts_problem(const ScheduleTraits& traits, int num_ranks, int num_stages,
                                          int num_micro_batches) {
  if (auto problem = stages_problem(traits, num_ranks, num_stages)) return problem;
  if (num_micro_batches < 1) return str("a step has 1 micro-batch or more, not ", num_micro_batches);
  return micro_batches_problem(traits, num_ranks, num_stages, num_micro_batches);
}

}  // namespace titan::pipeline

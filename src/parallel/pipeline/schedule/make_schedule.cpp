// Schedules by name, their maps of stages to ranks, and passes one behind the other.

#include <limits>
#include <utility>

#include "parallel/pipeline/schedule/generators.h"
#include "titan/core/error.h"
#include "titan/parallel/pipeline_generators.h"

namespace titan::pipeline {

namespace {

using Generator = std::vector<Action> (*)(const Counts&, int rank);

Generator generator_of(std::string_view name) {
  constexpr std::pair<std::string_view, Generator> kGenerators[] = {
      {"GPipe", gpipe},
      {"1F1B", one_forward_one_backward},
      {"Interleaved1F1B", interleaved_1f1b},
      {"LoopedBFS", looped_breadth_first},
      {"InterleavedZeroBubble", interleaved_zero_bubble},
      {"ZBVZeroBubble", zero_bubble_v},
      {"DualPipeV", dual_pipe_v}};
  for (const auto& [known, generator] : kGenerators)
    if (known == name) return generator;
  TITAN_INTERNAL_ASSERT(false, "schedule ", name, " has no generator");
  return nullptr;
}

void append_pass(std::vector<Action>& to, const std::vector<Action>& pass, int first_micro_batch, bool last) {
  for (Action action : pass) {
    if (action.kind == Action::Kind::Reduce && !last) continue;
    if (!is_parameter_action(action.kind)) action.micro_batch += first_micro_batch;
    to.push_back(action);
  }
}

}  // namespace

Schedule make_schedule(std::string_view name, int num_ranks, int num_stages, int num_micro_batches) {
  const ScheduleTraits& traits = schedule_traits(name);
  if (auto problem = counts_problem(traits, num_ranks, num_stages, num_micro_batches))
    throw ConfigError(*problem);
  Schedule schedule{.name = std::string(traits.name),
                    .num_stages = num_stages,
                    .num_micro_batches = num_micro_batches,
                    .rank_of_stage = stage_map(traits, num_ranks, num_stages),
                    .ranks = {}};
  const Counts counts{num_ranks, num_stages, num_micro_batches};
  for (int rank = 0; rank < num_ranks; ++rank)
    schedule.ranks.push_back(generator_of(traits.name)(counts, rank));
  return schedule;
}

std::vector<int> loop_stage_map(int num_ranks, int num_stages) {
  std::vector<int> map(num_stages);
  for (int stage = 0; stage < num_stages; ++stage) map[stage] = stage % num_ranks;
  return map;
}

std::vector<int> v_stage_map(int num_ranks, int num_stages) {
  std::vector<int> map(num_stages);
  for (int stage = 0; stage < num_stages; ++stage) {
    const int along = stage % num_ranks;
    map[stage] = stage / num_ranks % 2 == 0 ? along : num_ranks - 1 - along;
  }
  return map;
}

std::vector<int> stage_map(const ScheduleTraits& traits, int num_ranks, int num_stages) {
  return traits.stages_per_rank == StagesPerRank::TwoInV ? v_stage_map(num_ranks, num_stages)
                                                         : loop_stage_map(num_ranks, num_stages);
}

Schedule repeat(const Schedule& schedule, int times) {
  TITAN_CHECK(times >= 1, "repeat() wants a schedule 1 time or more, not ", times);
  TITAN_CHECK(times <= std::numeric_limits<int>::max() / schedule.num_micro_batches, "a schedule of ",
              schedule.num_micro_batches, " micro-batches can't be repeated ", times, " times");
  Schedule whole = schedule;
  whole.num_micro_batches = schedule.num_micro_batches * times;
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    whole.ranks[rank].clear();
    for (int pass = 0; pass < times; ++pass)
      append_pass(whole.ranks[rank], schedule.ranks[rank], pass * schedule.num_micro_batches,
                  pass + 1 == times);
  }
  return whole;
}

}  // namespace titan::pipeline

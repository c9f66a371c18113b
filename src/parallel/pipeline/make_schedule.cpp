// The traits of each schedule by its name, and the counts that it takes.

#include <algorithm>
#include <cctype>
#include <limits>
#include <utility>

#include "parallel/pipeline/generators.h"
#include "titan/core/error.h"
#include "titan/parallel/pipeline_schedule.h"

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

// The nearest valid counts, below and above.
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
  if (num_ranks < 1) return str("expected 1 or more pipeline ranks, got ", num_ranks);
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
  if (num_micro_batches < 1) return str("expected 1 or more micro-batches, got ", num_micro_batches);
  return micro_batches_problem(traits, num_ranks, num_stages, num_micro_batches);
}

// Schedules by name, their maps of stages to ranks, and repeated passes.

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
  TITAN_CHECK(times >= 1, "repeat(): expected 1 or more times, got ", times);
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

// Evaluation: forwards only, on any map of stages to ranks.

namespace {

/// Advances in steps of one forward per rank, as if all took the same time.
class ForwardOnly {
 public:
  explicit ForwardOnly(Schedule& schedule)
      : schedule_(schedule), done_(schedule.num_stages), stages_(schedule.ranks.size()) {
    for (int stage = schedule.num_stages - 1; stage >= 0; --stage)
      stages_[schedule.rank_of_stage[stage]].push_back(stage);
  }

  void run() {
    while (done_.back() < schedule_.num_micro_batches) step();
  }

 private:
  bool could_run(int stage) const {
    return done_[stage] < schedule_.num_micro_batches && (stage == 0 || done_[stage] < done_[stage - 1]);
  }

  // Chooses for all ranks before any counts as done: the next stage can use a result one step later.
  void step() {
    std::vector<int> chosen;
    for (const std::vector<int>& stages : stages_) {
      const auto first =
          std::find_if(stages.begin(), stages.end(), [&](int stage) { return could_run(stage); });
      if (first != stages.end()) chosen.push_back(*first);
    }
    for (int stage : chosen)
      schedule_.ranks[schedule_.rank_of_stage[stage]].push_back(
          {Action::Kind::Forward, stage, done_[stage]++});
  }

  Schedule& schedule_;
  std::vector<int> done_;                 // per stage: its micro-batches
  std::vector<std::vector<int>> stages_;  // per rank, the last first
};

}  // namespace

Schedule make_forward_only_schedule(const std::vector<int>& rank_of_stage, int num_micro_batches) {
  TITAN_CHECK(!rank_of_stage.empty() && num_micro_batches >= 1,
              "a forward-only schedule needs 1 or more stages and micro-batches, got ", rank_of_stage.size(),
              " and ", num_micro_batches);
  const int num_ranks = *std::max_element(rank_of_stage.begin(), rank_of_stage.end()) + 1;
  for (int rank = 0; rank < num_ranks; ++rank)
    TITAN_CHECK(std::count(rank_of_stage.begin(), rank_of_stage.end(), rank) > 0, "rank ", rank, " of ",
                num_ranks, " owns no stage");
  TITAN_CHECK(*std::min_element(rank_of_stage.begin(), rank_of_stage.end()) == 0,
              "a stage has a negative rank");
  Schedule schedule{.name = "ForwardOnly",
                    .num_stages = static_cast<int>(rank_of_stage.size()),
                    .num_micro_batches = num_micro_batches,
                    .rank_of_stage = rank_of_stage,
                    .ranks = std::vector<std::vector<Action>>(num_ranks)};
  ForwardOnly(schedule).run();
  return schedule;
}

}  // namespace titan::pipeline

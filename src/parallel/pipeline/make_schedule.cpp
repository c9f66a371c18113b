// Schedules by name: each one's actions, valid counts, and map of stages to ranks.

#include <algorithm>
#include <cctype>
#include <deque>
#include <limits>
#include <map>
#include <utility>

#include <c10/util/StringUtil.h>

#include "parallel/pipeline/actions.h"
#include "titan/core/error.h"

namespace titan::pipeline {

namespace {

using Kind = Action::Kind;

struct Counts {
  int num_ranks = 1;
  int num_stages = 1;
  int num_micro_batches = 1;

  int stages_per_rank() const { return num_stages / num_ranks; }
  /// Interleaved schedules process the micro-batches in rounds of about `num_ranks`.
  int num_rounds() const { return std::max(1, num_micro_batches / num_ranks); }
};

auto of_stage(int stage) {
  return [stage](const Action& action) { return action.stage == stage; };
}

// One rank's actions while a generator writes them. Each stage's micro-batches are numbered in order.
class RankList {
 public:
  explicit RankList(int num_stages) : next_(num_stages) {}

  void forward(int stage) { add(Action::Kind::Forward, stage, next_[stage].forward++); }
  void backward(int stage) { add(Action::Kind::Backward, stage, next_[stage].backward++); }
  /// Adds an I, whose W is owed from then on.
  void input(int stage) {
    const int micro_batch = next_[stage].backward++;
    add(Action::Kind::BackwardInput, stage, micro_batch);
    owed_.push_back({Action::Kind::BackwardWeight, stage, micro_batch});
  }
  /// Adds the W that the stage has owed longest.
  void weight(int stage) {
    const auto owed = std::find_if(owed_.begin(), owed_.end(), of_stage(stage));
    TITAN_INTERNAL_ASSERT(owed != owed_.end(), "stage ", stage, " owes no W");
    actions_.push_back(*owed);
    owed_.erase(owed);
  }
  /// Adds the W that the rank has owed longest; does nothing if none is owed.
  void oldest_weight() {
    if (owed_.empty()) return;
    actions_.push_back(owed_.front());
    owed_.pop_front();
  }

  int num_forward(int stage) const { return next_[stage].forward; }
  bool owes_weight(int stage) const { return std::any_of(owed_.begin(), owed_.end(), of_stage(stage)); }
  bool owes_weight() const { return !owed_.empty(); }
  std::vector<Action> take() { return std::move(actions_); }

 private:
  struct Next {
    int forward = 0;
    int backward = 0;  ///< B or I
  };
  void add(Action::Kind kind, int stage, int micro_batch) { actions_.push_back({kind, stage, micro_batch}); }

  std::vector<Next> next_;   // per stage
  std::deque<Action> owed_;  // W, oldest first
  std::vector<Action> actions_;
};

// One function per named schedule: the actions of one rank. The counts have passed counts_problem().
//
// Schedules of one stage per rank.

std::vector<Action> gpipe(const Counts& counts, int rank) {
  RankList list(counts.num_stages);
  for (int i = 0; i < counts.num_micro_batches; ++i) list.forward(rank);
  for (int i = 0; i < counts.num_micro_batches; ++i) list.backward(rank);
  return list.take();
}

std::vector<Action> one_forward_one_backward(const Counts& counts, int rank) {
  RankList list(counts.num_stages);
  // Runs as many forwards ahead as fit before the first gradient returns.
  const int ahead = counts.num_ranks - 1 - rank;
  for (int i = 0; i < ahead; ++i) list.forward(rank);
  for (int i = ahead; i < counts.num_micro_batches; ++i) {
    list.forward(rank);
    list.backward(rank);
  }
  for (int i = 0; i < ahead; ++i) list.backward(rank);
  return list.take();
}

// Schedules of several stages per rank, in a loop: rank r owns r, r+p, r+2p, ...

/// Chooses the next stage to run. A round of micro-batches runs through the rank's first stage, then through
/// its second, and so on; then the next round begins. Backwards run in reverse order of stages.
class Turns {
 public:
  Turns(const Counts& counts, int rank)
      : counts_(counts), rank_(rank), per_round_(counts.num_micro_batches / counts.num_rounds()) {}

  int num_steps() const { return counts_.stages_per_rank() * counts_.num_micro_batches; }
  int forward(int step) const { return stage(step / per_round_ % counts_.stages_per_rank()); }
  int backward(int step) const {
    return stage(counts_.stages_per_rank() - 1 - step / per_round_ % counts_.stages_per_rank());
  }
  /// The number of forwards before the first backward: those until the first micro-batch has reached the
  /// rank's last stage, and `per_hop` for each later rank.
  int warmup(int per_hop) const {
    const int later_ranks = counts_.num_ranks - 1 - rank_;
    return std::min((counts_.stages_per_rank() - 1) * per_round_ + per_hop * later_ranks, num_steps());
  }

 private:
  int stage(int local) const { return local * counts_.num_ranks + rank_; }

  Counts counts_;
  int rank_ = 0;
  int per_round_ = 1;
};

std::vector<Action> looped_breadth_first(const Counts& counts, int rank) {
  std::vector<Action> actions;
  for (int stage = rank; stage < counts.num_stages; stage += counts.num_ranks)
    for (int i = 0; i < counts.num_micro_batches; ++i) actions.push_back({Kind::Forward, stage, i});
  for (int stage = counts.num_stages - counts.num_ranks + rank; stage >= 0; stage -= counts.num_ranks)
    for (int i = counts.num_micro_batches - 1; i >= 0; --i) actions.push_back({Kind::Backward, stage, i});
  return actions;
}

std::vector<Action> interleaved_1f1b(const Counts& counts, int rank) {
  const Turns turns(counts, rank);
  const int steps = turns.num_steps(), warmup = turns.warmup(2);
  RankList list(counts.num_stages);
  for (int step = 0; step < warmup; ++step) list.forward(turns.forward(step));
  for (int step = warmup; step < steps; ++step) {
    list.forward(turns.forward(step));
    list.backward(turns.backward(step - warmup));
  }
  for (int step = steps - warmup; step < steps; ++step) list.backward(turns.backward(step));
  return list.take();
}

std::vector<Action> interleaved_zero_bubble(const Counts& counts, int rank) {
  const Turns turns(counts, rank);
  const int steps = turns.num_steps(), warmup = turns.warmup(1);
  RankList list(counts.num_stages);
  for (int step = 0; step < warmup; ++step) list.forward(turns.forward(step));
  for (int step = 0; step < steps; ++step) {
    if (step + warmup < steps) list.forward(turns.forward(step + warmup));
    list.input(turns.backward(step));
    // Later ranks hold back more W for the gaps at the end.
    if (step >= rank) list.oldest_weight();
  }
  while (list.owes_weight()) list.oldest_weight();
  return list.take();
}

// Schedules on a V: rank r owns stage r on the way down and stage 2p-1-r on the way up. Rank 0 has the first
// and the last stage.

struct V {
  V(const Counts& counts, int rank) : down(rank), up(counts.num_stages - 1 - rank), list(counts.num_stages) {}

  void split_backward(int stage) {
    list.input(stage);
    list.weight(stage);
  }
  void backward(int stage, bool split) { split ? list.input(stage) : list.backward(stage); }

  const int down, up;
  RankList list;
};

void zero_bubble_warmup(V& v, const Counts& counts, int rank) {
  for (int i = 0; i < 2 * (counts.num_ranks - rank) - 1; ++i) v.list.forward(v.down);
  for (int i = 0; i < rank; ++i) {
    v.list.forward(v.up);
    v.list.forward(v.down);
  }
  for (int i = 0; i < counts.num_ranks - rank; ++i) {
    v.list.forward(v.up);
    v.split_backward(v.up);
  }
}

void zero_bubble_steady(V& v, int num_micro_batches) {
  while (v.list.num_forward(v.up) < num_micro_batches) {
    if (v.list.num_forward(v.down) < num_micro_batches) v.list.forward(v.down);
    v.split_backward(v.down);
    v.list.forward(v.up);
    v.split_backward(v.up);
  }
}

void zero_bubble_cooldown(V& v, const Counts& counts, int rank) {
  for (int i = 0; i < rank; ++i) {
    v.list.input(v.down);
    v.list.input(v.up);
  }
  for (int i = 0; i < counts.num_ranks - rank; ++i) {
    v.list.input(v.down);
    v.list.weight(v.down);
  }
  while (v.list.owes_weight(v.up)) v.list.weight(v.up);
  while (v.list.owes_weight(v.down)) v.list.weight(v.down);
}

void dual_pipe_warmup(V& v, const Counts& counts, int rank) {
  const int later_ranks = counts.num_ranks - rank - 1;
  for (int i = 0; i < 2 * later_ranks; ++i) v.list.forward(v.down);
  for (int i = 0; i < rank + 1; ++i) {
    v.list.forward(v.down);
    v.list.forward(v.up);
  }
  for (int i = 0; i < later_ranks; ++i) {
    v.split_backward(v.up);
    v.list.forward(v.up);
  }
}

// DualPipe overlaps the pairs (F down, B up) and (F up, B down).
void dual_pipe_steady(V& v, const Counts& counts, int rank) {
  for (int i = 0; i < counts.num_micro_batches - 2 * counts.num_ranks + rank + 1; ++i) {
    v.list.forward(v.down);
    v.list.backward(v.up);
    v.list.forward(v.up);
    v.list.backward(v.down);
  }
  for (int i = 0; i < counts.num_ranks - rank - 1; ++i) {
    v.list.backward(v.up);
    v.list.forward(v.up);
    v.list.backward(v.down);
  }
}

// The second half of the remaining backwards is split; their W fill the gaps after it.
void dual_pipe_cooldown(V& v, const Counts& counts, int rank) {
  const int pairs = rank + 1, half = pairs / 2;
  bool split = false;
  for (int i = 0; i < pairs; ++i) {
    if (i == half && rank % 2 == 1) split = true;
    v.backward(v.up, split);
    if (i == half && rank % 2 == 0) split = true;
    v.backward(v.down, split);
  }
  for (int i = 0; i < counts.num_ranks - rank - 1; ++i) {
    v.list.oldest_weight();
    v.backward(v.down, split);
  }
  while (v.list.owes_weight()) v.list.oldest_weight();
}

std::vector<Action> zero_bubble_v(const Counts& counts, int rank) {
  // Plans for at least as many micro-batches as fill the V, then leaves out those that don't exist.
  const int planned = std::max(2 * counts.num_ranks - 1, counts.num_micro_batches);
  V v(counts, rank);
  zero_bubble_warmup(v, counts, rank);
  zero_bubble_steady(v, planned);
  zero_bubble_cooldown(v, counts, rank);
  std::vector<Action> actions = v.list.take();
  std::erase_if(actions,
                [&](const Action& action) { return action.micro_batch >= counts.num_micro_batches; });
  return actions;
}

std::vector<Action> dual_pipe_v(const Counts& counts, int rank) {
  V v(counts, rank);
  dual_pipe_warmup(v, counts, rank);
  dual_pipe_steady(v, counts, rank);
  dual_pipe_cooldown(v, counts, rank);
  return v.list.take();
}

bool same_name(std::string_view a, std::string_view b) {
  return std::ranges::equal(
      a, b, [](unsigned char one, unsigned char other) { return std::tolower(one) == std::tolower(other); });
}

bool whole_rounds(int num_ranks, int num_micro_batches) {
  const Counts counts{.num_ranks = num_ranks, .num_micro_batches = num_micro_batches};
  return num_micro_batches % counts.num_rounds() == 0;
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
               " rounds (micro-batches / ", num_ranks, " ranks) of equal size, which ", num_micro_batches,
               " doesn't allow; ", whole_rounds_nearby(num_ranks, num_micro_batches), " would do");
  return std::nullopt;
}

void append_pass(std::vector<Action>& to, const std::vector<Action>& pass, int first_micro_batch, bool last) {
  for (Action action : pass) {
    if (action.kind == Action::Kind::Reduce && !last) continue;
    if (!is_parameter_action(action.kind)) action.micro_batch += first_micro_batch;
    to.push_back(action);
  }
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
    if (same_name(traits.name, name)) return traits;
  const std::vector<std::string> names = schedule_names();
  throw ConfigError(str("unknown pipeline schedule '", name, "'", did_you_mean(name, names), " (known: '",
                        c10::Join("', '", names), "')"));
}

int default_num_stages(const ScheduleTraits& traits, int num_ranks) {
  return traits.stages_per_rank == StagesPerRank::One ? num_ranks : 2 * num_ranks;
}

std::optional<std::string> stages_problem(const ScheduleTraits& traits, int num_ranks, int num_stages) {
  if (num_ranks < 1) return str("expected 1 or more pipeline ranks, got ", num_ranks);
  const auto needs = [&](const std::string& what) {
    return str(traits.name, " needs ", what, "; got ", num_stages, num_stages == 1 ? " stage" : " stages",
               " on ", num_ranks, num_ranks == 1 ? " rank" : " ranks");
  };
  switch (traits.stages_per_rank) {
    case StagesPerRank::One:
      if (num_stages != num_ranks) return needs(str("one stage per rank, ", num_ranks, " in total"));
      break;
    case StagesPerRank::TwoInV:
      if (num_stages != 2 * num_ranks)
        return needs(str("exactly two stages per rank, ", 2 * num_ranks, " in total"));
      break;
    case StagesPerRank::Several:
      if (num_stages % num_ranks != 0 || num_stages < 2 * num_ranks)
        return needs(str("the same number of stages on each rank, two or more: a multiple of ", num_ranks,
                         ", at least ", 2 * num_ranks));
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

Schedule make_schedule(std::string_view name, int num_ranks, int num_stages, int num_micro_batches) {
  const ScheduleTraits& traits = schedule_traits(name);
  if (auto problem = counts_problem(traits, num_ranks, num_stages, num_micro_batches))
    throw ConfigError(*problem);
  Schedule schedule{.name = std::string(traits.name),
                    .num_stages = num_stages,
                    .num_micro_batches = num_micro_batches,
                    .rank_of_stage = stage_map(traits, num_ranks, num_stages),
                    .ranks = {}};
  static const std::map<std::string_view, std::vector<Action> (*)(const Counts&, int rank)> kGenerators = {
      {"GPipe", gpipe},
      {"1F1B", one_forward_one_backward},
      {"Interleaved1F1B", interleaved_1f1b},
      {"LoopedBFS", looped_breadth_first},
      {"InterleavedZeroBubble", interleaved_zero_bubble},
      {"ZBVZeroBubble", zero_bubble_v},
      {"DualPipeV", dual_pipe_v}};
  const Counts counts{num_ranks, num_stages, num_micro_batches};
  for (int rank = 0; rank < num_ranks; ++rank)
    schedule.ranks.push_back(kGenerators.at(traits.name)(counts, rank));
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

/// Advances in steps of one forward per rank, as if all forwards took the same time.
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

  // Chooses for all ranks before marking any as done, because the next stage can use a result one step later.
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
  std::vector<int> done_;                 // per stage: number of micro-batches
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

#include "parallel/pipeline/generators.h"

#include <algorithm>

#include "titan/core/error.h"

namespace titan::pipeline {

namespace {

auto of_stage(int stage) {
  return [stage](const Action& action) { return action.stage == stage; };
}

}  // namespace

void RankList::input(int stage) {
  const int micro_batch = next_[stage].backward++;
  add(Action::Kind::BackwardInput, stage, micro_batch);
  owed_.push_back({Action::Kind::BackwardWeight, stage, micro_batch});
}

void RankList::weight(int stage) {
  const auto owed = std::find_if(owed_.begin(), owed_.end(), of_stage(stage));
  TITAN_INTERNAL_ASSERT(owed != owed_.end(), "stage ", stage, " owes no W");
  actions_.push_back(*owed);
  owed_.erase(owed);
}

void RankList::oldest_weight() {
  if (owed_.empty()) return;
  actions_.push_back(owed_.front());
  owed_.pop_front();
}

bool RankList::owes_weight(int stage) const {
  return std::any_of(owed_.begin(), owed_.end(), of_stage(stage));
}

// Schedules of one stage a rank.

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

// Schedules of several stages a rank, in a loop: rank r owns r, r+p, r+2p, ...

namespace {

using Kind = Action::Kind;

/// The next stage to run. Depth first: a round of micro-batches through the rank's first stage, the same
/// through the second, and so on; then the next round. Backwards run in reverse.
class Turns {
 public:
  Turns(const Counts& counts, int rank)
      : counts_(counts), rank_(rank), per_round_(counts.num_micro_batches / counts.num_rounds()) {}

  int num_steps() const { return counts_.stages_per_rank() * counts_.num_micro_batches; }
  int forward(int step) const { return stage(step / per_round_ % counts_.stages_per_rank()); }
  int backward(int step) const {
    return stage(counts_.stages_per_rank() - 1 - step / per_round_ % counts_.stages_per_rank());
  }
  /// Forwards before the first backward: until the first micro-batch has reached the last of the rank's
  /// stages, and `per_hop` for each later rank.
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

}  // namespace

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

// Schedules on a V: rank r owns stage r, on the way down, and 2p-1-r, on the way up. Rank 0 has the first
// stage and the last.

namespace {

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

// The pairs (F down, B up) and (F up, B down) are those that DualPipe runs beside each other.
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

// The second half of what is left is split: its W fill the gaps after it.
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

}  // namespace

std::vector<Action> zero_bubble_v(const Counts& counts, int rank) {
  // Plans for as many micro-batches as fill the V, then leaves out those that don't exist.
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

}  // namespace titan::pipeline

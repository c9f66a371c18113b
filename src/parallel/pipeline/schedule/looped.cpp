// Schedules of several stages a rank, in a loop: rank r owns r, r+p, r+2p, ...

#include "parallel/pipeline/schedule/generators.h"
#include "parallel/pipeline/schedule/rank_list.h"

namespace titan::pipeline {

namespace {

using Kind = Action::Kind;

/// Which stage has its turn. Depth first: a round of micro-batches through the first of the rank's stages,
/// the same through the second, and so on; then the next round. Backwards the other way round.
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
  /// stages, and `per_hop` for each rank behind this one.
  int warmup(int per_hop) const {
    const int behind = counts_.num_ranks - 1 - rank_;
    return std::min((counts_.stages_per_rank() - 1) * per_round_ + per_hop * behind, num_steps());
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
    // The later the rank, the more W it holds back for the gaps at the end.
    if (step >= rank) list.oldest_weight();
  }
  while (list.owes_weight()) list.oldest_weight();
  return list.take();
}

}  // namespace titan::pipeline

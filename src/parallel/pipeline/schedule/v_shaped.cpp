// Schedules on a V: rank r owns stage r, on the way down, and 2p-1-r, on the way up. Rank 0 has the first
// stage and the last.

#include <algorithm>

#include "parallel/pipeline/schedule/generators.h"
#include "parallel/pipeline/schedule/rank_list.h"

namespace titan::pipeline {

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
  const int behind = counts.num_ranks - rank - 1;
  for (int i = 0; i < 2 * behind; ++i) v.list.forward(v.down);
  for (int i = 0; i < rank + 1; ++i) {
    v.list.forward(v.down);
    v.list.forward(v.up);
  }
  for (int i = 0; i < behind; ++i) {
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

// The second half of what is left is split: its W fill the gaps behind it.
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
  // Planned for as many micro-batches as fill the V; those that don't exist are left out afterwards.
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

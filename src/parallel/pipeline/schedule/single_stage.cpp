// Schedules of one stage a rank.

#include "parallel/pipeline/schedule/generators.h"
#include "parallel/pipeline/schedule/rank_list.h"

namespace titan::pipeline {

std::vector<Action> gpipe(const Counts& counts, int rank) {
  RankList list(counts.num_stages);
  for (int i = 0; i < counts.num_micro_batches; ++i) list.forward(rank);
  for (int i = 0; i < counts.num_micro_batches; ++i) list.backward(rank);
  return list.take();
}

std::vector<Action> one_forward_one_backward(const Counts& counts, int rank) {
  RankList list(counts.num_stages);
  // As many forwards ahead as it takes until the first gradient is back.
  const int ahead = counts.num_ranks - 1 - rank;
  for (int i = 0; i < ahead; ++i) list.forward(rank);
  for (int i = ahead; i < counts.num_micro_batches; ++i) {
    list.forward(rank);
    list.backward(rank);
  }
  for (int i = 0; i < ahead; ++i) list.backward(rank);
  return list.take();
}

}  // namespace titan::pipeline

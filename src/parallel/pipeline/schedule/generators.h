#pragma once

// One function per named schedule: the actions of one rank. The counts have passed counts_problem().

#include <algorithm>
#include <vector>

#include "titan/parallel/pipeline_schedule.h"

namespace titan::pipeline {

struct Counts {
  int num_ranks = 1;
  int num_stages = 1;
  int num_micro_batches = 1;

  int stages_per_rank() const { return num_stages / num_ranks; }
  /// Interleaved schedules go through the micro-batches in rounds of about `num_ranks`.
  int num_rounds() const { return std::max(1, num_micro_batches / num_ranks); }
};

std::vector<Action> gpipe(const Counts& counts, int rank);
std::vector<Action> one_forward_one_backward(const Counts& counts, int rank);
std::vector<Action> looped_breadth_first(const Counts& counts, int rank);
std::vector<Action> interleaved_1f1b(const Counts& counts, int rank);
std::vector<Action> interleaved_zero_bubble(const Counts& counts, int rank);
std::vector<Action> zero_bubble_v(const Counts& counts, int rank);
std::vector<Action> dual_pipe_v(const Counts& counts, int rank);

}  // namespace titan::pipeline

#pragma once

// One function per named schedule: the actions of one rank. The counts have passed counts_problem().

#include <algorithm>
#include <deque>
#include <utility>
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

// One rank's actions while a generator writes them: each stage's micro-batches are numbered as they come.

class RankList {
 public:
  explicit RankList(int num_stages) : next_(num_stages) {}

  void forward(int stage) { add(Action::Kind::Forward, stage, next_[stage].forward++); }
  void backward(int stage) { add(Action::Kind::Backward, stage, next_[stage].backward++); }
  /// I; its W is owed from then on.
  void input(int stage);
  /// The W that the stage has owed longest.
  void weight(int stage);
  /// The W that the rank has owed longest; does nothing where none is owed.
  void oldest_weight();

  int num_forward(int stage) const { return next_[stage].forward; }
  bool owes_weight(int stage) const;
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

}  // namespace titan::pipeline

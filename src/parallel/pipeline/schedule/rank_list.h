#pragma once

// One rank's actions while a generator writes them: each stage's micro-batches are numbered as they come.

#include <deque>
#include <utility>
#include <vector>

#include "titan/parallel/pipeline_schedule.h"

namespace titan::pipeline {

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

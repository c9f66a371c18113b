#pragma once

// The checker's parts in the order in which they run. Each assumes that those before it found no problem.

#include <utility>
#include <vector>

#include "parallel/pipeline/actions.h"
#include "titan/core/error.h"
#include "titan/parallel/pipeline_schedule.h"

namespace titan::pipeline {

/// A limited number of problems.
class Findings {
 public:
  template <class... Args>
  void add(int rank, int position, const Args&... args) {
    if (problems_.size() < kMost) problems_.push_back({rank, position, str(args...)});
  }
  bool empty() const { return problems_.empty(); }
  std::vector<Problem> take() { return std::move(problems_); }

 private:
  static constexpr size_t kMost = 20;
  std::vector<Problem> problems_;
};

/// The position of each action with a micro-batch in its rank's list.
class Positions {
 public:
  static constexpr int kNone = -1;
  explicit Positions(const Schedule& schedule);
  int& of(const Action& action) { return positions_[static_cast<size_t>(action.kind)](action); }
  int of(const Action& action) const { return positions_[static_cast<size_t>(action.kind)](action); }
  bool has(const Action& action) const { return of(action) != kNone; }
  /// The position of the stage's B or I.
  int backward(int stage, int micro_batch) const;

 private:
  std::vector<PerMicroBatch<int>> positions_;  // per kind
};

struct CheckCase {
  const Schedule& schedule;
  const CheckOptions& options;
  bool communicates = false, gathers = false, reduces = false;  ///< whether any such action is there
  Findings findings = {};
};

/// The numbers and the map of stages to ranks.
void check_shape(CheckCase& check);
/// Each action by itself. Fills `positions`.
void check_actions(CheckCase& check, Positions& positions);
void check_complete(CheckCase& check, const Positions& positions);
void check_order(CheckCase& check, const Positions& positions);
void check_channels(CheckCase& check);
void check_parameters(CheckCase& check);
void check_live_activations(CheckCase& check);
void check_progress(CheckCase& check);

}  // namespace titan::pipeline

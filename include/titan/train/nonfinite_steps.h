#pragma once

// What a run does about a loss or gradient norm that isn't finite: fault_tolerance.on_nonfinite.

#include <cstdint>
#include <functional>
#include <string>

#include "titan/train/fault_tolerance_settings.h"

namespace titan::train {

/// Counts the steps that were skipped. All ranks tell it the same, so that all stop at the same step.
class NonFiniteSteps {
 public:
  explicit NonFiniteSteps(const FaultToleranceSettings& settings) : settings_(settings) {}

  /// `problem` says which number isn't finite. Returns where the optimizer's step is skipped; throws
  /// UnsoundRun where the run stops, with what `explain` then has to say of it.
  void add(const std::string& problem, const std::function<std::string()>& explain = {});
  void add_finite() { in_a_row_ = 0; }

  bool skips() const { return settings_.on_nonfinite == "skip"; }
  int64_t total() const { return total_; }
  /// Of which the last step is one.
  int64_t in_a_row() const { return in_a_row_; }

  /// For checkpoints, as JSON. Loading one keeps a total that is higher than the state's: of a run that has
  /// gone back.
  std::string state() const;
  void load(const std::string& state);

 private:
  FaultToleranceSettings settings_;
  int64_t total_ = 0;
  int64_t in_a_row_ = 0;
};

}  // namespace titan::train

#pragma once

// fault_tolerance.on_nonfinite: what a run does about a loss or gradient norm that isn't finite.

#include <cstdint>
#include <functional>
#include <string>

#include "titan/train/policy.h"
#include "train/policies/fault_tolerance_settings.h"

namespace titan::train {

/// Counts the steps that were skipped, and stops the run where there are too many.
class NonFiniteSteps final : public TrainerPolicy {
 public:
  explicit NonFiniteSteps(const FaultToleranceSettings& settings) : settings_(settings) {}

  bool skip(const std::string& problem, const std::function<std::string()>& explain) override;
  void judge(Trainer& trainer, const StepValues& values) override;
  std::string why_not_save() const override;
  void add_metrics(StepMetrics& metrics) const override;
  std::string state() const override;
  /// Keeps a total that is higher than the state's: the run has gone back.
  void load(const std::string& state) override;

  int64_t total() const { return total_; }
  int64_t in_a_row() const { return in_a_row_; }

 private:
  FaultToleranceSettings settings_;
  int64_t total_ = 0;
  int64_t in_a_row_ = 0;  // up to the last step
};

}  // namespace titan::train

#pragma once

// [fault_tolerance]: how a run reacts to signals, to steps that go wrong and to replicas that differ, and the
// policies for the first two. TorchTitan's keys of this table are about replica groups that join and leave a
// run, which don't exist here.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "titan/config/table.h"
#include "titan/dist/world.h"
#include "titan/train/policy.h"

namespace titan::train {

/// [fault_tolerance]
struct FaultToleranceSettings {
  config::StringList requeue_on;  ///< signals after which the SLURM job is put back into the queue

  std::string on_nonfinite = "stop";    ///< for a non-finite loss or gradient norm: "stop" or "skip"
  int64_t max_nonfinite_in_a_row = 10;  ///< with "skip"; one more stops the run
  int64_t max_nonfinite_steps = 100;    ///< the same for the whole run

  double spike_sigma = 0;            ///< standard deviations above the mean that make a loss a spike; 0: off
  int64_t spike_window = 100;        ///< number of losses in the mean and deviation
  int64_t spike_rewind_steps = 100;  ///< minimum steps to rewind, if a checkpoint is that old
  int64_t max_rewinds = 3;           ///< in the whole run; one more spike stops it

  int64_t check_replicas_freq = 0;  ///< steps between comparisons of replicas; 0: off
};

void describe(config::Table<FaultToleranceSettings>& table);

class SignalListener;

/// A signal to any rank stops all of them after the same step ([Note: stopping] in interruption.h).
class StopOnSignal final : public TrainerPolicy {
 public:
  /// Collective over the world.
  explicit StopOnSignal(const dist::World& world);
  ~StopOnSignal() override;

  Vote vote() override;
  bool gives_up_waiting() override;
  std::optional<StopCause> stop_cause() override;

 private:
  bool is_asked_by_peer();

  dist::World world_;
  // Set in the job's store by a rank that received a signal; empty: there are no other ranks.
  std::string key_;
  std::unique_ptr<SignalListener> listener_;
  bool asked_by_peer_ = false;
  int num_asked_ = 0;  // calls of gives_up_waiting
};

/// fault_tolerance.on_nonfinite: what a run does about a loss or gradient norm that isn't finite. Counts the
/// skipped steps, and stops the run if there are too many.
class NonFiniteSteps final : public TrainerPolicy {
 public:
  explicit NonFiniteSteps(const FaultToleranceSettings& settings) : settings_(settings) {}

  bool skip(const std::string& problem, const std::function<std::string()>& explain) override;
  void judge(Trainer& trainer, const StepValues& values) override;
  std::string why_not_save() const override;
  void add_metrics(StepMetrics& metrics) const override;
  std::string state() const override;
  /// Keeps its own total if that is higher than the state's, because the run has been rewound.
  void load(const std::string& state) override;

  int64_t total() const { return total_; }
  int64_t in_a_row() const { return in_a_row_; }

 private:
  FaultToleranceSettings settings_;
  int64_t total_ = 0;
  int64_t in_a_row_ = 0;  // ending with the last step
};

}  // namespace titan::train

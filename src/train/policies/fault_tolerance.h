#pragma once

// [fault_tolerance]: what a run does about signals, steps that go wrong, and ranks that compute something
// else; and the policies for the first two. TorchTitan's keys of this table are about replica groups that
// come and go, which don't exist here.

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

  std::string on_nonfinite = "stop";    ///< a loss or gradient norm that isn't finite: "stop" or "skip"
  int64_t max_nonfinite_in_a_row = 10;  ///< with "skip"; one more stops the run
  int64_t max_nonfinite_steps = 100;    ///< the same, of the whole run

  double spike_sigma = 0;      ///< a loss so many standard deviations above its mean is a spike; 0: none is
  int64_t spike_window = 100;  ///< losses that mean and deviation are of
  int64_t spike_rewind_steps = 100;  ///< least distance back from a spike, if there is such a checkpoint
  int64_t max_rewinds = 3;           ///< to a checkpoint, in a whole run; a further spike stops it

  int64_t check_replicas_freq = 0;  ///< steps from one comparison of replicas to the next; 0: none
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
  std::string
      key_;  // in the job's store, set by a rank that was sent a signal; empty: there are no other ranks
  std::unique_ptr<SignalListener> listener_;
  bool told_ = false;  // by a peer
  int num_asked_ = 0;  // calls of gives_up_waiting
};

/// fault_tolerance.on_nonfinite: what a run does about a loss or gradient norm that isn't finite. Counts the
/// steps that were skipped, and stops the run where there are too many.
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

#pragma once

// Who is told of what a trainer does: watchdog, event log, profiler. An observer watches and says nothing of
// the numbers; what decides about a step (a step that isn't finite, a request to stop) is the trainer's.

#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

namespace titan::train {

struct StepMetrics;
struct ValidationMetrics;

/// What a rank is at. All but Load and Finish are part of a Step.
enum class Phase : uint8_t {
  Load,
  Step,
  Data,
  ForwardBackward,
  Optimizer,
  Log,
  Save,
  Validate,
  CheckReplicas,
  Finish
};

/// "load", "step", "data", "forward_backward", "optimizer", "log", "save", "validate", "check_replicas",
/// "finish"
const char* name_of(Phase phase);

/// Called by the training thread, so a call costs step time: tens of nanoseconds are fine, files are not.
class RunObserver {
 public:
  virtual ~RunObserver() = default;

  /// `step`: the step in progress, from 1; while loading, 0.
  virtual void begin(Phase /*phase*/, int64_t /*step*/) {}
  /// `failed`: an exception leaves the phase.
  virtual void end(Phase /*phase*/, int64_t /*step*/, bool /*failed*/) {}
  /// Steps begin after `step` (0: anew); called again after a rewind.
  virtual void begin_after(int64_t /*step*/) {}
  /// The metrics of a logged step; called on every rank.
  virtual void logged(const StepMetrics& /*metrics*/) {}
  virtual void validated(const ValidationMetrics& /*metrics*/) {}
  /// Everything that the observer heard so far must be on disk when it returns.
  virtual void flush() {}
  /// All ranks have agreed to end the run early, for this signal.
  virtual void stopped(int /*signal*/) {}
};

using RunObservers = std::vector<std::unique_ptr<RunObserver>>;

/// Tells all observers of a phase as long as it lives, the last of them first at its end.
class PhaseScope {
 public:
  PhaseScope(const RunObservers& observers, Phase phase, int64_t step)
      : observers_(observers), phase_(phase), step_(step), exceptions_(std::uncaught_exceptions()) {
    for (const auto& observer : observers_) observer->begin(phase_, step_);
  }
  ~PhaseScope() {
    const bool failed = std::uncaught_exceptions() > exceptions_;
    for (auto at = observers_.rbegin(); at != observers_.rend(); ++at) (*at)->end(phase_, step_, failed);
  }
  PhaseScope(const PhaseScope&) = delete;
  PhaseScope& operator=(const PhaseScope&) = delete;

 private:
  const RunObservers& observers_;
  Phase phase_;
  int64_t step_;
  int exceptions_;
};

}  // namespace titan::train

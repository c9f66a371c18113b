#pragma once

// The interface through which the watchdog, metrics, event log and profiler see what the trainer does. An
// observer changes nothing about the run; a policy (policy.h) may.

#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

namespace titan::train {

struct StepMetrics;
struct ValidationMetrics;

/// What a rank is doing. All but Load and Finish are part of a Step.
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

inline const char* name_of(Phase phase) {
  constexpr std::array names = {"load", "step", "data",     "forward_backward", "optimizer",
                                "log",  "save", "validate", "check_replicas",   "finish"};
  return names[static_cast<size_t>(phase)];
}

/// Called by the training thread, so a call costs step time: tens of nanoseconds are fine, files are not.
class RunObserver {
 public:
  virtual ~RunObserver() = default;
  /// `step`: the step in progress, from 1; 0 while loading.
  virtual void begin(Phase /*phase*/, int64_t /*step*/) {}
  /// `failed`: an exception leaves the phase.
  virtual void end(Phase /*phase*/, int64_t /*step*/, bool /*failed*/) {}
  /// The next step to run is the one after `step`, at a start (0: from the beginning) and after going back to
  /// a checkpoint. Records of later steps, from an earlier run or from before going back, no longer hold.
  virtual void begin_after(int64_t /*step*/) {}
  /// This step's figures as rank 0 logs them; called on every rank.
  virtual void logged(const StepMetrics& /*metrics*/) {}
  virtual void validated(const ValidationMetrics& /*metrics*/) {}
  /// All ranks have agreed to end the run early, because of this signal (0: of something else).
  virtual void stopped(int /*signal*/) {}
  /// The run is over: everything logged should be on disk afterwards.
  virtual void flush() {}
};
using RunObservers = std::vector<std::unique_ptr<RunObserver>>;

/// Tells all observers of a phase as long as it lives, in reverse order at its end.
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

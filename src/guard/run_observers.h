#pragma once

// Observers that guard a run by its phases: the watchdog, the flight recorder, the search for NaN.

#include <memory>
#include <vector>

#include "dist/flight_record.h"
#include "titan/guard/nan_search.h"
#include "titan/guard/watchdog.h"
#include "titan/nn/hooks.h"
#include "titan/train/run_observer.h"

namespace titan::train {

/// Reports a run's phases, and each forward (one per micro-batch), to a watchdog as progress.
class RunWatchdog final : public RunObserver {
 public:
  /// `startup`: the limits until the first step is over; `training`: the limits after it.
  RunWatchdog(std::shared_ptr<dist::Watchdog> watchdog, const dist::WatchdogLimits& startup,
              dist::WatchdogLimits training, const std::vector<nn::AnyRef>& models);
  /// Removes its hooks from the models. While an error unwinds, the watchdog watches until Watchdog::explain(),
  /// with the limit of a save.
  ~RunWatchdog() override;
  void begin(Phase phase, int64_t step) override;
  void end(Phase phase, int64_t step, bool failed) override;

 private:
  std::vector<nn::AnyRef> models_;
  dist::WatchdogLimits training_;
  std::shared_ptr<dist::Watchdog> watchdog_;
  bool first_step_is_over_ = false;
  /// Where the run is, the innermost phase last; before and between phases, the first one.
  struct Place {
    dist::ProgressKind kind;
    const char* what;
  };
  std::vector<Place> places_ = {{dist::ProgressKind::Compute, "start"}};
};

/// Reports a run's current phase to the flight recorder.
class FlightPhases final : public RunObserver {
 public:
  explicit FlightPhases(std::shared_ptr<dist::FlightRecorder> recorder);
  ~FlightPhases() override;
  void begin(Phase phase, int64_t step) override;
  void end(Phase phase, int64_t step, bool failed) override;

 private:
  std::shared_ptr<dist::FlightRecorder> recorder_;
  std::vector<Phase> phases_;  // the innermost last
};

/// Searches every step for a number that isn't finite: debug.nan_trace, debug.detect_anomaly. Before the
/// optimizer's step it also checks the parameters' gradients, if it searches modules.
class NanWatch final : public RunObserver {
 public:
  NanWatch(const std::vector<nn::AnyRef>& models, std::vector<Parameter> parameters,
           const NanSearch::Options& options);
  void begin(Phase phase, int64_t step) override;

 private:
  std::vector<Parameter> parameters_;
  bool checks_gradients_;
  NanSearch search_;
};

}  // namespace titan::train

#pragma once

// The watchdog and the flight recorder of a run.

#include <memory>
#include <vector>

#include "titan/guard/watchdog.h"
#include "titan/train/run_observer.h"

namespace titan::dist {
class FlightRecorder;
}

namespace titan::train {

struct JobConfig;

/// The watchdog of this rank, with the files of [comm]. It judges nothing yet (RunWatchdog begins that).
std::shared_ptr<dist::Watchdog> make_watchdog(const JobConfig& config, const dist::World& world);

/// Tells the recorder the phase that a run is in.
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

}  // namespace titan::train

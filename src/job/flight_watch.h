#pragma once

// The flight recorder of a run: its records in files, the ranks' signs of life, and what a rank is at.

#include <memory>
#include <string>

#include "guard/flight_dump.h"
#include "guard/heartbeat.h"
#include "titan/train/run_observer.h"

namespace titan::train {

struct JobConfig;

class FlightWatch {
 public:
  FlightWatch(const JobConfig& config, const dist::World& world);

  /// One line about where a failure comes from; see dist::Heartbeat::explain.
  std::string explain(const std::string& failure) noexcept { return heartbeat_.explain(failure); }
  /// Null: comm.trace_buf_size is 0.
  const std::shared_ptr<dist::FlightDump>& dump() const { return dump_; }

 private:
  std::shared_ptr<dist::FlightDump> dump_;
  dist::Heartbeat heartbeat_;
};

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

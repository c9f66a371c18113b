#pragma once

// The watchdog of a job: what the trainer is at, under the limits of [comm].

#include <memory>
#include <vector>

#include "titan/guard/watchdog.h"
#include "titan/nn/hooks.h"
#include "titan/train/checkpoint_settings.h"
#include "titan/train/comm_settings.h"
#include "titan/train/run_observer.h"

namespace titan::train {

/// Until the process's first step is over, in which all that is lazy is set up, and behind it.
dist::WatchdogLimits startup_limits(const CommSettings& comm, const CheckpointSettings& checkpoint);
dist::WatchdogLimits training_limits(const CommSettings& comm, const CheckpointSettings& checkpoint);

/// How long a collective waits that the watchdog is to be faster than. Without a watchdog, and behind the
/// first step, train_timeout_seconds itself.
int64_t collective_timeout_s(const CommSettings& comm, const CheckpointSettings& checkpoint);

class RunWatchdog final : public RunObserver {
 public:
  /// `models`: whose forwards, one per micro-batch, are progress too.
  RunWatchdog(std::shared_ptr<dist::Watchdog> watchdog, const dist::WatchdogLimits& startup,
              dist::WatchdogLimits training, const std::vector<nn::AnyRef>& models);
  /// Takes the hooks of the models out again.
  ~RunWatchdog() override;
  void begin(Phase phase, int64_t step) override;
  void end(Phase phase, int64_t step, bool failed) override;

 private:
  std::vector<nn::AnyRef> models_;
  dist::WatchdogLimits training_;
  std::shared_ptr<dist::Watchdog> watchdog_;
  bool first_step_is_over_ = false;
};

}  // namespace titan::train

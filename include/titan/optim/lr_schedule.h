#pragma once

// The learning rate over a run: linear warmup, a stable part at the peak, decay to a floor.

#include <cstdint>

#include "titan/optim/optimizer.h"

namespace titan::optim {

/// TorchTitan's schedule as a pure function of the step, so that there is no state to save.
class LrSchedule {
 public:
  /// `training_steps` is the length where the settings name none. A warmup or decay that doesn't fit into it
  /// is cut, with a warning on rank 0, as TorchTitan does.
  LrSchedule(const LrSchedulerSettings& settings, int64_t training_steps);

  /// The factor on the peak learning rate at 0-based `step`; behind the end of the schedule the floor.
  double factor(int64_t step) const;

 private:
  enum class Decay { Linear, Sqrt, Cosine };
  double decayed(double progress) const;

  Decay decay_ = Decay::Linear;
  double min_factor_ = 0;
  int64_t warmup_steps_ = 0;
  int64_t stable_steps_ = 0;
  int64_t decay_steps_ = 0;
};

}  // namespace titan::optim

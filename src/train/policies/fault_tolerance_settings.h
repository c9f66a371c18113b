#pragma once

// [fault_tolerance]: what a run does about signals, steps that go wrong, and ranks that compute something
// else. TorchTitan's keys of this table are about replica groups that come and go, which don't exist here.

#include <string>

#include "titan/config/table.h"

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

}  // namespace titan::train

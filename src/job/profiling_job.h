#pragma once

// [profiling] of a job.

#include "job/job_config.h"
#include "titan/observe/structured_log.h"
#include "titan/train/trainer.h"

namespace titan::train {

/// Before what is to be seen in memory snapshots is made.
void start_memory_history(const JobConfig& config, at::Device device);

class StepProfiler;

/// What watches a run of these models. Returns what writes traces, null: nothing does. `log` may be
/// null.
StepProfiler* add_profilers(RunObservers& observers, const JobConfig& config, const dist::World& world,
                            const std::vector<std::unique_ptr<TrainableModel>>& models, StructuredLog* log);

}  // namespace titan::train

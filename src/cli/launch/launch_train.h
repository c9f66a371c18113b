#pragma once

// `titan train --nproc N --max-restarts K`: what the job's settings say about restarts.

#include "cli/arguments.h"
#include "dist/environment.h"
#include "job/job_config.h"
#include "titan/config/schema.h"

namespace titan::cli {

/// Throws ConfigError if restarted ranks couldn't resume where the last ones were.
void check_train_restarts(const TrainArguments& arguments, const train::JobConfig& config,
                          const config::Origins& origins);

/// The same for a rank whose launcher restarts ranks: `titan launch --max-restarts K -- titan train ...`, or
/// torchrun. For torchrun, which restarts by default, checkpoints may be off.
void check_launched_restarts(const dist::Launch& launch, const train::JobConfig& config,
                             const config::Origins& origins);

/// Adds the restarts of `arguments` to `options`: for numbers of ranks on which the job can run, with the settings
/// that make fewer ranks train the same run. Ranks that are asked to end get as much time as the job's limits
/// allow. `config` and `origins` must outlive `options`. Throws ConfigError when --min-ranks allows fewer ranks
/// than --nproc, but the job runs on no such number.
void set_train_restarts(const TrainArguments& arguments, const train::JobConfig& config,
                        const config::Origins& origins, LaunchOptions& options);

}  // namespace titan::cli

#pragma once

// `titan train --nproc N --max-restarts K`: what the job's settings say about restarts.

#include "cli/arguments.h"
#include "dist/environment.h"
#include "job/job_config.h"
#include "titan/config/schema.h"

namespace titan::cli {

/// Throws ConfigError where a restart wouldn't go on where the ranks were.
void check_train_restarts(const TrainArguments& arguments, const train::JobConfig& config,
                          const config::Origins& origins);

/// The same of a rank whose launcher has such restarts: `titan launch --max-restarts K -- titan train ...`,
/// and torchrun's, where it is no more than a default, and checkpoints that are off are left to be.
void check_launched_restarts(const dist::Launch& launch, const train::JobConfig& config,
                             const config::Origins& origins);

/// `arguments`' restarts, on numbers of ranks that the job's mesh, and whatever else depends on it, can do
/// with, and what ranks have to be told so that fewer of them train the same run. Ranks that are told to end
/// have as long as the job's limits give them. The job has to live as long as `options`. Throws ConfigError
/// when none below --nproc is one, and
/// --min-ranks asks for such.
void set_train_restarts(const TrainArguments& arguments, const train::JobConfig& config,
                        const config::Origins& origins, LaunchOptions& options);

}  // namespace titan::cli

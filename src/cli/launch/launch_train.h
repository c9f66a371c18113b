#pragma once

// How `titan train` works with what starts its ranks: restarts by --nproc, the exit code after a stop, and SLURM's
// queue.
//
// torchrun: when hosts join or leave, an agent stops its ranks. The agents of other hosts then see their own ranks
// end, too. An agent takes exit code 0 for the end of the job, after which nothing is restarted. So stopped ranks
// exit as if the signal had killed them.

#include <string>

#include "cli/arguments.h"
#include "dist/environment.h"
#include "job/job_config.h"
#include "titan/config/load.h"
#include "titan/config/table.h"
#include "titan/train/run_end.h"

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

/// The exit code of a rank that stopped before the run was finished: 128 + the signal if an agent of torchrun that may
/// restart ranks (--max-restarts) sent one to any of them, and then logs that; otherwise 0.
int code_after_stop(const dist::Launch& launch, const train::StopCause& stop);

/// The process that passes signals on to the ranks of `launch`: this process's parent; 0: none does.
int signaling_launcher(const dist::Launch& launch);

// fault_tolerance.requeue_on: a job goes back into SLURM's queue after a stop by a signal.

/// This process's job, as `scontrol requeue` takes it; in a job array, only this task. "" if SLURM didn't start the
/// process.
std::string slurm_job(const dist::Environment& environment);

/// Whether a stop by `signal` puts the job back. `signals`: names as train::signal_name gives them.
bool requeues_on(const config::StringList& signals, int signal);

/// Runs `scontrol requeue JOB`. Throws Error if it can't be started, fails, or takes longer than half a minute.
void requeue(const std::string& job);

}  // namespace titan::cli

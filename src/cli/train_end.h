#pragma once

// Ranks that torchrun's agent stops, as hosts join or leave. The agents of other hosts see theirs end with
// them, and to an agent ranks that end with 0 have come to the end of the job: it then ends, and lets nobody
// start again. So such ranks end as ones that were killed.

#include <string>

#include "dist/environment.h"
#include "titan/config/table.h"
#include "titan/train/run_end.h"

namespace titan::cli {

/// What a rank ends with behind a stop of a run that isn't through: 128 + the signal where an agent of
/// torchrun's that may start ranks again (--max-restarts) sent one to any of them; else 0. Says so in the
/// log.
int code_after_stop(const dist::Launch& launch, const train::StopCause& stop);

/// The process that passes signals on to the ranks of `launch`: this one's parent; 0: there is none.
int signaling_launcher(const dist::Launch& launch);

// Back into SLURM's queue, behind a stop by a signal: fault_tolerance.requeue_on.

/// What `scontrol requeue` is told of this process's job: of a job array the task alone. Empty: SLURM has not
/// started it.
std::string slurm_job(const dist::Environment& environment);

/// Whether a stop by this signal, one of train::signal_name's, puts the job back.
bool requeues_on(const config::StringList& signals, int signal);

/// `scontrol requeue JOB`. Throws Error when it can't be run, fails, or takes longer than half a minute.
void requeue(const std::string& job);

}  // namespace titan::cli

#pragma once

// Back into SLURM's queue, behind a stop by a signal: fault_tolerance.requeue_on.

#include <string>

#include "dist/environment.h"
#include "titan/config/table.h"

namespace titan::cli {

/// What `scontrol requeue` is told of this process's job: of a job array the task alone. Empty: SLURM has not
/// started it.
std::string slurm_job(const dist::Environment& environment);

/// Whether a stop by this signal, one of train::signal_name's, puts the job back.
bool requeues_on(const config::StringList& signals, int signal);

/// `scontrol requeue JOB`. Throws Error when it can't be run, fails, or takes longer than half a minute.
void requeue(const std::string& job);

}  // namespace titan::cli

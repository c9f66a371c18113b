#pragma once

// Ranks that torchrun's agent stops, as hosts join or leave. The agents of other hosts see theirs end with
// them, and to an agent ranks that end with 0 have come to the end of the job: it then ends, and lets nobody
// start again. So such ranks end as ones that were killed.

#include "dist/environment.h"
#include "titan/train/stop_cause.h"

namespace titan::cli {

/// What a rank ends with behind a stop of a run that isn't through: 128 + the signal where an agent of
/// torchrun's that may start ranks again (--max-restarts) sent one to any of them; else 0. Says so in the
/// log.
int code_behind_stop(const dist::Launch& launch, const train::StopCause& stop);

/// The process that passes signals on to the ranks of `launch`: this one's parent; 0: there is none.
int signaling_launcher(const dist::Launch& launch);

}  // namespace titan::cli

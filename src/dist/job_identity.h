#pragma once

// What stays the same while a job's ranks are started again, and is no other job's.

#include <string>

#include "environment.h"

namespace titan::dist {

struct JobIdentity {
  std::string id;       ///< empty: see `problem`
  std::string problem;  ///< why nobody starts these ranks again
};

/// titan launch's TITAN_JOB_ID, torchrun's --rdzv-id, SLURM's job. Throws ConfigError as read_launch does.
JobIdentity read_job_identity(const Environment& environment);

}  // namespace titan::dist

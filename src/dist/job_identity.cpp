#include "job_identity.h"

#include "titan/core/error.h"

namespace titan::dist {

namespace {

JobIdentity of_titan(const Launch& launch, const Environment& environment) {
  if (launch.max_restarts == 0)
    return {.id = "", .problem = "the launcher starts no ranks again: give it --max-restarts"};
  const auto id = environment("TITAN_JOB_ID");
  return id ? JobIdentity{*id, ""}
            : JobIdentity{"", "TITAN_JOB_ID isn't set, which titan launch of this version sets"};
}

JobIdentity of_torchrun(const Environment& environment) {
  const std::string id = environment("TORCHELASTIC_RUN_ID").value_or("none");
  // The one that jobs without a name have.
  if (id == "none") return {.id = "", .problem = "torchrun was given no --rdzv-id, which tells jobs apart"};
  return {"torchrun " + id, ""};
}

JobIdentity of_slurm(const Environment& environment) {
  const auto id = environment("SLURM_JOB_ID");
  return id ? JobIdentity{"slurm " + *id, ""} : JobIdentity{"", "SLURM_JOB_ID isn't set"};
}

}  // namespace

JobIdentity read_job_identity(const Environment& environment) {
  const Launch launch = read_launch(environment);
  if (launch.by == "titan") return of_titan(launch, environment);
  if (launch.by == "torchrun") return of_torchrun(environment);
  if (launch.by == "slurm") return of_slurm(environment);
  return {.id = "",
          .problem = launch.by == "none"
                         ? "nobody launched this rank"
                         : str("ranks were launched by ", launch.by, ", which starts none again")};
}

}  // namespace titan::dist

#pragma once

// The launcher that started this process, according to the environment. Reading is separate from connecting,
// so that every combination can be tested without a process.

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace titan::dist {

/// Value of a variable, nullopt when it isn't set (or empty).
using Environment = std::function<std::optional<std::string>(const char* name)>;

/// getenv.
Environment process_environment();

struct Launch {
  /// "torchrun", "titan", "env" (plain RANK, WORLD_SIZE), "openmpi", "slurm" or "none"
  std::string by = "none";
  int rank = 0;
  int size = 1;
  int local_rank = -1;  ///< -1: unknown, counted from the host names
  int local_size = -1;
  std::string store_host;  ///< where rank 0 (or torchrun's agent) serves the store
  int store_port = 0;
  int listen_fd = -1;        ///< rank 0 under titan launch: the bound socket to serve on
  bool serves_store = true;  ///< false under torchrun's agent, which serves it itself
  int max_restarts = 0;      ///< how often the launcher may restart the ranks; 0 if unknown
};

/// Looks for, in this order: torchrun and titan launch (by variables of their own, so an allocation around
/// them doesn't matter), plain RANK and WORLD_SIZE, Open MPI, SLURM (as a task of srun; a job script or an
/// interactive shell is one rank by itself), none. Throws ConfigError with all problems: only one of two
/// variables, a rank outside the world, or two launchers that disagree about rank or size.
Launch read_launch(const Environment& environment);

/// Splits at commas outside brackets.
std::vector<std::string_view> split_list(std::string_view list);

/// SLURM's list of nodes: "gpu[01-03,7],login1" -> gpu01 gpu02 gpu03 gpu7 login1; several brackets in one
/// name multiply, the last fastest. Throws ConfigError for anything else.
std::vector<std::string> parse_node_list(std::string_view list);

/// SLURM_TASKS_PER_NODE: "4(x2),3" -> 4 4 3.
std::vector<int> parse_task_counts(std::string_view list);

/// Identifies a job across restarts of its ranks.
struct JobIdentity {
  std::string id;       ///< empty: see `problem`
  std::string problem;  ///< the reason why no launcher restarts these ranks
};

/// titan launch's TITAN_JOB_ID, torchrun's --rdzv-id, SLURM's job.
JobIdentity read_job_identity(const Launch& launch, const Environment& environment);

}  // namespace titan::dist

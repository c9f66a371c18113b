#pragma once

// `titan train`: its command line, which `titan plan` shares, and how it works with launchers: restarts by --nproc, the exit code after
// a stop, and SLURM's queue.
//
// torchrun: when hosts join or leave, an agent stops its ranks. The agents of other hosts then see their own
// ranks end, too. An agent takes exit code 0 for the end of the job, after which nothing is restarted. So
// stopped ranks exit as if the signal had killed them.

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/launch/launch.h"
#include "dist/environment.h"
#include "job/job_config.h"
#include "titan/config/table.h"
#include "titan/train/run_end.h"

namespace titan::cli {

/// `titan train [CONFIG] [--nproc N] [--log-rank RANKS] [--max-restarts K ...] [--print-config]
/// [--print-plan] [--check] [--section.key value ...]`, in any order, except that CONFIG comes before the first
/// setting.
struct TrainArguments {
  std::filesystem::path config;
  int num_ranks = 0;  ///< 0: --nproc wasn't given
  std::string log_rank = "0";
  RestartOptions restarts;
  std::optional<std::chrono::milliseconds> stop_grace;  ///< unset: --grace wasn't given
  bool print_config = false;
  bool print_plan = false;
  bool check = false;
  std::vector<std::string> overrides;  ///< the settings, for config::load
};
/// The settings themselves are read by config::load. Throws ConfigError for an unknown word or an invalid
/// value, and HelpText when the words ask for help.
TrainArguments parse_train_arguments(const Arguments& words);

/// `titan plan CONFIG --world N [--device NAME|FILE.toml] [--json] [--section.key value ...]`
struct PlanArguments {
  std::filesystem::path config;
  std::vector<std::string> overrides;  ///< the settings, for config::load
  int world_size = 0;
  std::string device = "h100";
  std::string kernels = "ours";  ///< or "compiled", "eager"
  bool json = false;
  int for_run = 0;                      ///< the process of the run that asks for its plan; 0: a user asks
  std::filesystem::path timeline, svg;  ///< files to write, if any

  bool search = false;
  int64_t sequences = 0;                                      ///< in a step; 0: as the config says
  int64_t max_tensor = 0, max_context = 0, max_pipeline = 0;  ///< 0: no limit of the user's
  int64_t search_seconds = 200;
  bool search_float8 = true, least_memory = false;
  std::filesystem::path output;     ///< for the config of the best layout
  std::filesystem::path calibrate;  ///< for what this machine's own device reaches; nothing is planned
  std::filesystem::path
      links;  ///< measured by this process as one of a calibration's ranks; nothing else is read
};
/// As parse_train_arguments.
PlanArguments parse_plan_arguments(const Arguments& words);

/// Throws ConfigError if the ranks that this one's launcher restarts couldn't resume where the last ones
/// were: `titan launch --max-restarts K -- titan train ...`, or torchrun. For torchrun, which restarts by
/// default, checkpoints may be off.
void check_launched_restarts(const dist::Launch& launch, const train::JobConfig& config,
                             const config::Origins& origins);

/// The exit code of a rank that stopped before the run was finished: 128 + the signal if an agent of torchrun
/// that may restart ranks (--max-restarts) sent one to any of them, and then logs that; otherwise 0.
int code_after_stop(const dist::Launch& launch, const train::StopCause& stop);

/// How a run ended, and would start again.
struct NextStart {
  int64_t last_step = 0;
  std::string ranks;  ///< words of the command line: " --nproc 4 --max-restarts 2"; "" with another launcher
};
/// A run's folder, and commands for a shell that report, compare and resume it, for the end of its log.
std::string next_commands(const train::JobConfig& config, const NextStart& next);

/// The process that passes signals on to the ranks of `launch`: this process's parent, or 0 if none does.
int signaling_launcher(const dist::Launch& launch);

}  // namespace titan::cli

// titan train: settings, then either ranks on this machine (--nproc) or this process's part of a job.

#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <limits>

#include "cli/arguments.h"
#include "cli/launch/launch_train.h"
#include "cli/text.h"
#include "core/process.h"
#include "dist/environment.h"
#include "guard/flight_dump.h"
#include "guard/startup_watch.h"
#include "job/build.h"
#include "job/checkpoint_job.h"
#include "job/dry_run.h"
#include "job/job_config.h"
#include "job/memory_report.h"
#include "job/observers.h"
#include "tensor/memory.h"
#include "titan/config/load.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/guard/watchdog.h"
#include "train/policies/interruption.h"

namespace titan::cli {

namespace {

/// Tells the ranks that --nproc starts whether a terminal shows their output.
constexpr const char* kOnTerminal = "TITAN_ON_TERMINAL";
/// Tells them that the files of this config have been checked.
constexpr const char* kFilesChecked = "TITAN_FILES_CHECKED";

// The help text ends with all settings.
TrainArguments parse(const Arguments& words) {
  try {
    return parse_train_arguments(words);
  } catch (const HelpText& help) {
    throw HelpText{help.text + config::help_text(train::job_schema())};
  }
}

struct LoadedJob {
  train::JobConfig config;
  config::Origins origins;
};

bool is_switch(std::string word) {
  if (!word.starts_with("--") || word.find('=') != std::string::npos) return false;
  std::replace(word.begin(), word.end(), '-', '_');
  const config::FieldInfo* field = train::job_schema().find(std::string_view(word).substr(2));
  return field != nullptr && field->kind == config::Kind::Bool;
}

/// After a switch, a config file would be read as the switch's value.
void check_config_comes_first(const TrainArguments& arguments) {
  const std::vector<std::string>& words = arguments.overrides;
  for (size_t at = 1; arguments.config.empty() && at < words.size(); ++at) {
    const bool names_config = words[at].ends_with(".toml") || words[at].ends_with(".json");
    if (names_config && is_switch(words[at - 1]))
      throw ConfigError(str("titan train: ", words[at], " was read as the value of ", words[at - 1],
                            ": put the config file first"));
  }
}

LoadedJob load_job(const TrainArguments& arguments) {
  check_config_comes_first(arguments);
  if (arguments.config.empty() && arguments.overrides.empty())
    throw ConfigError("titan train needs a config file or settings (see titan train --help)");
  LoadedJob job;
  job.origins = config::load(train::job_schema(), {arguments.config, arguments.overrides}, job.config);
  // It has been read; a printed config must not refer to another file.
  job.config.job.config_file.reset();
  return job;
}

std::vector<std::string> rank_command(const TrainArguments& arguments) {
  std::vector<std::string> command = {std::filesystem::read_symlink("/proc/self/exe").string(), "train"};
  if (!arguments.config.empty() && !config::override_value(arguments.overrides, "job.config_file"))
    command.push_back(arguments.config.string());
  command.insert(command.end(), arguments.overrides.begin(), arguments.overrides.end());
  return command;
}

// Called after a stop by `signal`; 0: none.
void requeue_if_wanted(const train::JobConfig& config, int signal) {
  if (train::group_grows()) return;  // the launcher starts the ranks again itself
  if (requeues_on(config.fault_tolerance.requeue_on, signal)) requeue(slurm_job(dist::process_environment()));
}

int launch_ranks(const TrainArguments& arguments, const LoadedJob& job) {
  if (::isatty(STDERR_FILENO)) ::setenv(kOnTerminal, "1", /*overwrite=*/1);
  ::setenv(kFilesChecked, "1", /*overwrite=*/1);
  pass_on_launch_time();
  LaunchOptions options;
  options.num_ranks = arguments.num_ranks;
  options.command = rank_command(arguments);
  options.log_rank = arguments.log_rank;
  options.memory_folder = job.config.checkpoint.peer_folder;
  set_train_restarts(arguments, job.config, job.origins, options);
  options.on_end_without_ranks = [&](int signal) { requeue_if_wanted(job.config, signal); };
  return launch_local(options);
}

// cuBLAS reads it when its first handle is made.
void set_determinism_environment(const train::DebugSettings& debug) {
  if (debug.deterministic) ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
}

// Kineto reads it when it starts. Without a GPU it would log an error; level 5 silences it.
void set_profiler_environment(const train::ProfilingSettings& profiling) {
  if (profiling.enable_profiling) ::setenv("KINETO_LOG_LEVEL", "5", /*overwrite=*/0);
}

// The host allocator keeps what tensors free; this keeps what libraries free, like the packed operands of matrix
// products.
void keep_freed_memory() {
  install_host_allocator();
#ifdef __GLIBC__
  ::mallopt(M_MMAP_MAX, 0);
  ::mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
#endif
}

// A shell that srun started alone isn't a rank: its user may start ranks.
bool is_rank_of_a_job(const dist::Launch& launch) {
  return launch.by != "none" && !(launch.by == "slurm" && launch.size == 1);
}

// A rank of --nproc writes into a pipe of its parent's, which may be the one on the terminal.
bool on_terminal(const dist::Launch& launch) {
  return ::isatty(STDERR_FILENO) || (launch.by == "titan" && ::getenv(kOnTerminal));
}

train::JobFiles files_to_check(const dist::Launch& launch) {
  const bool parent_did = launch.by == "titan" && ::getenv(kFilesChecked);
  return parent_did ? train::JobFiles::Ignore : train::JobFiles::Check;
}

void configure_log(const train::JobConfig& config, const dist::Launch& launch) {
  log::Settings settings = log::settings();
  settings.rank = launch.rank;
  settings.world_size =
      launch.by == "titan" ? 1 : launch.size;  // titan launch tags every line with its rank itself
  settings.color = on_terminal(launch) && !config.metrics.disable_color_printing;
  log::configure(settings);
}

// For --nproc's ranks, or the job's, or the product of the degrees.
int print_plan(const TrainArguments& arguments, const LoadedJob& job, const dist::Launch& launch) {
  const int num_ranks = arguments.num_ranks > 0    ? arguments.num_ranks
                        : is_rank_of_a_job(launch) ? launch.size
                                                   : train::smallest_world(job.config.parallelism);
  train::check_job(job.config, job.origins, num_ranks, train::JobFiles::Ignore);
  return print(train::plan_table(job.config, num_ranks));
}

void check_requeue(const train::FaultToleranceSettings& settings) {
  if (!settings.requeue_on.empty() && slurm_job(dist::process_environment()).empty())
    throw ConfigError(
        "fault_tolerance.requeue_on puts a SLURM job back into its queue, and SLURM hasn't started this one "
        "(SLURM_JOB_ID isn't set)");
}

// Explains an out-of-memory error here, where the settings are; main() prints the error itself.
train::RunEnd run_trainer(const train::JobConfig& config, const dist::World& world, bool on_terminal,
                          const train::CheckedFiles& checked, train::StartupWatch& startup) {
  const auto watchdog = train::make_watchdog(config, world);
  try {
    train::Trainer trainer = train::build_trainer(config, world, on_terminal, checked, watchdog);
    startup.end();
    return trainer.train();
  } catch (const ConfigError&) {
    throw;  // all ranks report the same: none is lost
  } catch (const std::exception& error) {
    if (train::is_out_of_memory(error)) log::error(train::explain_out_of_memory(config, world));
    if (world.size() > 1) log::error("the job fails: " + watchdog->explain(error.what()));
    throw;
  }
}

int run_rank(const train::JobConfig& config, const dist::Launch& launch, const train::CheckedFiles& checked) {
  keep_freed_memory();
  set_determinism_environment(config.debug);
  set_profiler_environment(config.profiling);
  if (config.comm.trace_buf_size > 0) dist::survive_sigquit();
  const train::SignalWatch signals(signaling_launcher(launch));
  const auto code_after = [&](const train::StopCause& stop) {
    const int code = code_after_stop(launch, stop);
    // A job that continues by itself isn't put back into the queue.
    if (code == 0 && launch.rank == 0) requeue_if_wanted(config, stop.signal);
    return code;
  };
  train::StartupWatch startup(code_after);
  dist::World world = train::build_world(config);
  // With states in memory, a stop waits until the newest one is loaded, to save it.
  if (config.checkpoint.peer_interval > 0) {
    startup.end();
  } else {
    startup.join(world);
  }
  if (train::run_has_ended(config, world)) return 0;
  const train::RunEnd end = run_trainer(config, world, on_terminal(launch), checked, startup);
  // Stopped during its last validation: all steps are trained and saved.
  if (end.step >= config.training.steps) return 0;
  return code_after(end.stop);
}

}  // namespace

int train_command(const Arguments& words) {
  const TrainArguments arguments = parse(words);
  const LoadedJob job = load_job(arguments);
  if (arguments.print_config) return print(config::print_toml(train::job_schema(), job.config));
  const dist::Launch launch = dist::read_launch(dist::process_environment());
  if (arguments.print_plan) return print_plan(arguments, job, launch);
  if (arguments.num_ranks > 0 && is_rank_of_a_job(launch))
    throw ConfigError(str("--nproc starts ranks, but this process is itself a rank started by ", launch.by));
  check_train_restarts(arguments, job.config, job.origins);
  const bool starts_ranks = arguments.num_ranks > 1 || arguments.restarts.max_restarts > 0;
  if (!starts_ranks) check_launched_restarts(launch, job.config, job.origins);
  // The parent checks, too, so that a wrong setting is reported once, before any rank exists.
  if (!starts_ranks) configure_log(job.config, launch);
  const train::CheckedFiles checked = train::check_job(
      job.config, job.origins, starts_ranks ? arguments.num_ranks : launch.size, files_to_check(launch));
  check_requeue(job.config.fault_tolerance);
  return starts_ranks ? launch_ranks(arguments, job) : run_rank(job.config, launch, checked);
}

}  // namespace titan::cli

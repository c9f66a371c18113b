// titan train: settings, then either ranks on this machine (--nproc) or this process's part of a job.

#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <limits>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "dist/environment.h"
#include "tensor/host_allocator.h"
#include "titan/cli/launch.h"
#include "titan/config/print.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/train/build.h"
#include "titan/train/dry_run.h"
#include "titan/train/job_config.h"

namespace titan::cli {

namespace {

/// Tells the ranks that --nproc starts whether somebody watches.
constexpr const char* kOnTerminal = "TITAN_ON_TERMINAL";
/// And that the files of this config were looked at.
constexpr const char* kFilesChecked = "TITAN_FILES_CHECKED";

int print_help(const TrainArguments& arguments) {
  std::fputs(arguments.help.c_str(), stdout);
  std::fputs(config::help_text(train::job_schema()).c_str(), stdout);
  return 0;
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

/// Behind a switch, a config file is read as the switch's value.
void check_config_comes_first(const TrainArguments& arguments) {
  const std::vector<std::string>& words = arguments.overrides;
  for (size_t at = 1; arguments.config.empty() && at < words.size(); ++at) {
    const bool names_config = words[at].ends_with(".toml") || words[at].ends_with(".json");
    if (names_config && is_switch(words[at - 1]))
      throw ConfigError(str("titan train: ", words[at], " stands behind ", words[at - 1],
                            ", as its value; the config file comes before the first setting"));
  }
}

LoadedJob load_job(const TrainArguments& arguments) {
  check_config_comes_first(arguments);
  if (arguments.config.empty() && arguments.overrides.empty())
    throw ConfigError("titan train wants a config file or settings (see titan train --help)");
  LoadedJob job;
  job.origins = config::load(train::job_schema(), {arguments.config, arguments.overrides}, job.config);
  // It has done its work; kept, it would point a printed config at another file.
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

int launch_ranks(const TrainArguments& arguments) {
  if (::isatty(STDERR_FILENO)) ::setenv(kOnTerminal, "1", /*overwrite=*/1);
  ::setenv(kFilesChecked, "1", /*overwrite=*/1);
  LaunchOptions options;
  options.num_ranks = arguments.num_ranks;
  options.command = rank_command(arguments);
  options.log_rank = arguments.log_rank;
  return launch_local(options);
}

// cuBLAS reads it when its first handle is made.
void set_determinism_environment(const train::DebugSettings& debug) {
  if (debug.deterministic) ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
}

// What tensors free is kept by the host allocator; this is about what libraries free, as matrix products
// their packed operands.
void keep_freed_memory() {
  install_host_allocator();
#ifdef __GLIBC__
  ::mallopt(M_MMAP_MAX, 0);
  ::mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
#endif
}

// A shell that srun started alone is no rank: its user may start some.
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

// Of --nproc's ranks, or the job's, or as many as the degrees come to.
int print_plan(const TrainArguments& arguments, const LoadedJob& job, const dist::Launch& launch) {
  const int num_ranks = arguments.num_ranks > 0    ? arguments.num_ranks
                        : is_rank_of_a_job(launch) ? launch.size
                                                   : train::smallest_world(job.config.parallelism);
  train::check_job(job.config, job.origins, num_ranks, train::JobFiles::Ignore);
  std::fputs(train::plan_table(job.config, num_ranks).c_str(), stdout);
  return 0;
}

int run_rank(const train::JobConfig& config, const dist::Launch& launch, const train::CheckedFiles& checked) {
  keep_freed_memory();
  set_determinism_environment(config.debug);
  dist::World world = train::build_world(config);
  train::build_trainer(config, world, on_terminal(launch), checked).train();
  return 0;
}

}  // namespace

int train_command(const Arguments& words) {
  TrainArguments arguments = parse_train_arguments(words);
  if (!arguments.help.empty()) return print_help(arguments);
  LoadedJob job = load_job(arguments);
  if (arguments.print_config)
    return std::fputs(config::print_toml(train::job_schema(), job.config).c_str(), stdout), 0;
  dist::Launch launch = dist::read_launch(dist::process_environment());
  if (arguments.print_plan) return print_plan(arguments, job, launch);
  if (arguments.num_ranks > 0 && is_rank_of_a_job(launch))
    throw ConfigError(str("--nproc starts ranks, but this process is itself a rank started by ", launch.by));
  const bool starts_ranks = arguments.num_ranks > 1;
  // The parent checks too, so that a wrong setting is told once, and before any rank exists.
  if (!starts_ranks) configure_log(job.config, launch);
  const train::CheckedFiles checked = train::check_job(
      job.config, job.origins, starts_ranks ? arguments.num_ranks : launch.size, files_to_check(launch));
  return starts_ranks ? launch_ranks(arguments) : run_rank(job.config, launch, checked);
}

}  // namespace titan::cli

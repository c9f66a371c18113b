// titan train: settings, then either ranks on this machine (--nproc) or this process's part of a job.

#include "cli/train.h"
#include "cli/plan_command.h"

#include <malloc.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <thread>

#include "cli/plan_watch.h"
#include "cli/text.h"
#include "core/process.h"
#include "dist/environment.h"
#include "dist/stream.h"
#include "guard/flight_dump.h"
#include "guard/startup_watch.h"
#include "job/build.h"
#include "job/dry_run.h"
#include "job/job_config.h"
#include "tensor/memory.h"
#include "titan/config/load.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/guard/watchdog.h"
#include "titan/train/parallel_dims.h"
#include "train/policies/interruption.h"

namespace titan::cli {

namespace {

// Throws ConfigError for settings that keep restarted ranks from resuming where the last ones were.
// `must_save`: from a checkpoint. `may_shrink`: fewer ranks may be restarted.
void check_resumable(const train::JobConfig& config, const config::Origins& origins, bool must_save,
                     bool may_shrink) {
  std::vector<std::string> problems;
  const auto require = [&](bool holds, const char* key, const char* what) {
    if (!holds) problems.push_back(origins.problem(key, str("with --max-restarts ", what)));
  };
  const train::CheckpointSettings& checkpoint = config.checkpoint;
  if (must_save) {
    require(checkpoint.enable, "checkpoint.enable", "must be true: restarted ranks resume from a checkpoint");
    require(!checkpoint.load_only, "checkpoint.load_only",
            "must be false: otherwise there is no checkpoint to resume from");
  }
  require(checkpoint.load_step == -1, "checkpoint.load_step",
          "must be -1, the newest: otherwise each restart goes back to this step");
  require(checkpoint.exclude_from_loading.empty(), "checkpoint.exclude_from_loading",
          "must be empty: otherwise each restart leaves these out again");
  require(!may_shrink || config.training.global_batch_size != -1, "training.global_batch_size",
          "and --min-ranks must be a number: with -1 it depends on the number of ranks, so fewer ranks would "
          "train a different run");
  if (!problems.empty()) throw ConfigError(problems);
}

/// The environment variable that tells --nproc's ranks whether a terminal shows their output.
constexpr const char* kOnTerminal = "TITAN_ON_TERMINAL";
/// The environment variable that tells them that the files of this config have been checked.
constexpr const char* kFilesChecked = "TITAN_FILES_CHECKED";

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
  // The file has been read; a printed config must not refer to another one.
  job.config.job.config_file.reset();
  return job;
}

// The help text ends with all settings, among them those of the model and the plugin that the words choose.
std::string settings_help(Arguments words) {
  std::erase_if(words, [](const std::string& word) { return word == "-h" || word == "--help"; });
  try {
    const TrainArguments arguments = parse_train_arguments(words);
    if (arguments.config.empty() && arguments.overrides.empty())
      return config::help_text(train::job_schema());
    return config::help_text(train::job_schema(), load_job(arguments).config);
  } catch (const ConfigError& error) {
    return str(config::help_text(train::job_schema()),
               "\nThe tables above are those of the defaults, because this command line can't be read: ",
               error.problems().front(), "\n");
  }
}

TrainArguments parse(const Arguments& words) {
  try {
    return parse_train_arguments(words);
  } catch (const HelpText& help) {
    throw HelpText{help.text + settings_help(words)};
  }
}

std::vector<std::string> rank_command(const TrainArguments& arguments) {
  std::vector<std::string> command = {std::filesystem::read_symlink("/proc/self/exe").string(), "train"};
  if (!arguments.config.empty() && !config::override_value(arguments.overrides, "job.config_file"))
    command.push_back(arguments.config.string());
  command.insert(command.end(), arguments.overrides.begin(), arguments.overrides.end());
  return command;
}

void check_train_restarts(const TrainArguments& arguments, const LoadedJob& job) {
  const int least = arguments.restarts.min_ranks;
  if (arguments.restarts.max_restarts == 0) return;
  if (arguments.num_ranks == 0) throw ConfigError("titan train: --max-restarts needs --nproc");
  check_resumable(job.config, job.origins, /*must_save=*/true,
                  /*may_shrink=*/least > 0 && least < arguments.num_ranks);
}

/// The reason why the job can't run on `num_ranks` ranks, or "".
std::string misfit(const LoadedJob& job, int num_ranks) {
  try {
    train::check_job(job.config, job.origins, num_ranks, train::JobFiles::Ignore);
    return "";
  } catch (const ConfigError& error) {
    return error.problems().front();
  }
}

// The time for a step (perhaps the first one), a save in progress, and the last save.
std::chrono::seconds longest_stop(const train::JobConfig& config) {
  const int64_t step_s = std::max(config.comm.init_timeout_seconds, config.comm.train_timeout_seconds);
  return std::chrono::seconds(step_s +
                              (config.checkpoint.enable ? 2 * config.checkpoint.timeout_seconds : 0));
}

// The validation batch keeps its full size, too, so that losses before and after the loss of a rank are
// comparable.
void keep_validation(const TrainArguments& arguments, const train::JobConfig& config,
                     std::vector<std::string>& command) {
  const train::ValidationSettings& validation = config.validation;
  if (!validation.enable || validation.global_batch_size != -1) return;
  const train::ParallelDims dims = train::resolve_parallel_dims(config.parallelism, arguments.num_ranks);
  command.push_back("--validation.global_batch_size");
  command.push_back(std::to_string(validation.local_batch_size * dims.batch_degree()));
}

// Sets the restart options: the numbers of ranks that fit the job, the grace period, and the settings with
// which fewer ranks train the same run. `job` must outlive `options`.
void set_train_restarts(const TrainArguments& arguments, const LoadedJob& job, LaunchOptions& options) {
  options.restarts = arguments.restarts;
  RestartOptions& restarts = options.restarts;
  restarts.fits = [&job](int num_ranks) { return misfit(job, num_ranks).empty(); };
  // The ranks' own watchdogs end hangs.
  options.stop_grace = arguments.stop_grace.value_or(longest_stop(job.config));
  const int most = options.num_ranks - 1, least = restarts.min_ranks;
  if (least == 0 || least > most) return;
  keep_validation(arguments, job.config, options.command);
  for (int size = most; size >= least; --size)
    if (restarts.fits(size)) return;
  throw ConfigError(str("--min-ranks ", least, ": no number of ranks from ", least, " to ", most,
                        " fits the job's settings. On ", most, ": ", misfit(job, most)));
}

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kLongestRequeue{30};

// Returns the status that waitpid gives.
int wait_for_end(pid_t child, const std::string& what) {
  const auto deadline = Clock::now() + kLongestRequeue;
  int status = 0;
  while (::waitpid(child, &status, WNOHANG) != child) {
    if (Clock::now() > deadline) {
      ::kill(child, SIGKILL);
      ::waitpid(child, &status, 0);
      throw Error(str(what, " didn't end within ", kLongestRequeue.count(), " s"));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return status;
}

// This process's job, as `scontrol requeue` takes it; in a job array, only this task. "" if SLURM didn't
// start the process. SLURM_JOB_ID of an array's task may also be the number of the whole array.
std::string slurm_job() {
  const dist::Environment environment = dist::process_environment();
  const auto array = environment("SLURM_ARRAY_JOB_ID"), task = environment("SLURM_ARRAY_TASK_ID");
  if (array && task) return str(*array, "_", *task);
  return environment("SLURM_JOB_ID").value_or("");
}

// Runs `scontrol requeue JOB`.
void requeue(const std::string& job) {
  const std::string what = "scontrol requeue " + job;
  const int status = wait_for_end(start_program({"scontrol", "requeue", job}), what);
  TITAN_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, what, " failed (",
              WIFEXITED(status) ? "exit code " : "signal ",
              WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status),
              "): the job is not back in the queue");
  log::info("the job is back in SLURM's queue: " + what);
}

// fault_tolerance.requeue_on: a job goes back into SLURM's queue after a stop by `signal`; 0: none.
void requeue_if_wanted(const train::JobConfig& config, int signal) {
  if (train::group_grows()) return;  // the launcher starts the ranks again itself
  const auto& signals = config.fault_tolerance.requeue_on;
  if (signal != 0 && std::ranges::count(signals, train::signal_name(signal)) > 0) requeue(slurm_job());
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
  set_train_restarts(arguments, job, options);
  options.on_end_without_ranks = [&](int signal) { requeue_if_wanted(job.config, signal); };
  return launch_local(options);
}

// The host allocator keeps what tensors free; this keeps what libraries free, like the packed operands of
// matrix products.
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

// A rank of --nproc writes into a pipe to its parent; the parent may be on the terminal.
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

// As many ranks as --nproc asks for, as the job has, or as the product of the degrees.
int ranks_to_plan_for(const TrainArguments& arguments, const LoadedJob& job, const dist::Launch& launch) {
  return arguments.num_ranks > 0    ? arguments.num_ranks
         : is_rank_of_a_job(launch) ? launch.size
                                    : train::smallest_world(job.config.parallelism);
}

// The plan needs no files, but its sizes are those of the run only if the tokenizer fits them.
std::string tokenizer_line(const LoadedJob& job, int num_ranks) {
  try {
    train::check_job(job.config, job.origins, num_ranks, train::JobFiles::Tokenizer);
    return "";
  } catch (const ConfigError& error) {
    return str("\nsize of the vocabulary: unknown, the plan is for model.args. ", error.problems().front(),
               "\n");
  }
}

int print_plan(const TrainArguments& arguments, const LoadedJob& job, const dist::Launch& launch) {
  const int num_ranks = ranks_to_plan_for(arguments, job, launch);
  train::check_job(job.config, job.origins, num_ranks, train::JobFiles::Ignore);
  return print(train::plan_table(job.config, num_ranks) + tokenizer_line(job, num_ranks));
}

void check_requeue(const train::FaultToleranceSettings& settings) {
  if (!settings.requeue_on.empty() && slurm_job().empty())
    throw ConfigError(
        "fault_tolerance.requeue_on puts a SLURM job back into its queue, and SLURM hasn't started this one "
        "(SLURM_JOB_ID isn't set)");
}

constexpr const char* kCublasVariable = "CUBLAS_WORKSPACE_CONFIG";

// LibTorch refuses a GPU's first product with other values.
void check_deterministic(const train::JobConfig& config, const config::Origins& origins) {
  if (!config.debug.deterministic || config.training.device == "cpu" || !dist::gpu_visible() ||
      !std::filesystem::exists(dist::cuda_plugin_path()))
    return;
  const char* set = ::getenv(kCublasVariable);
  const std::string value = set ? set : ":4096:8";
  if (value == ":4096:8" || value == ":16:8") return;
  throw ConfigError(
      origins.problem("debug.deterministic", str("cuBLAS repeats its results only with ", kCublasVariable,
                                                 " = :4096:8 or :16:8, and it is ", value, "; unset it")));
}

// States in memory need restarts. Ranks that --max-restarts restarts check this themselves, because only they
// have their job's id.
void check_peer_states(const TrainArguments& arguments, const train::CheckpointSettings& settings,
                       dist::Launch launch) {
  if (arguments.restarts.max_restarts > 0) return;
  if (arguments.num_ranks > 1) launch.by = "titan";
  train::peer_settings(settings, launch);
}

// --check: reports what a start would find.
int check_only(const TrainArguments& arguments, const LoadedJob& job, const dist::Launch& launch) {
  const int num_ranks = ranks_to_plan_for(arguments, job, launch);
  train::StartReport report = train::check_start(
      job.config, job.origins, num_ranks, /*all_here=*/num_ranks == arguments.num_ranks || num_ranks == 1);
  const auto judge = [&report](const auto& check) {
    try {
      check();
    } catch (const ConfigError& error) {
      report.problems.insert(report.problems.end(), error.problems().begin(), error.problems().end());
    }
  };
  judge([&] { check_train_restarts(arguments, job); });
  judge([&] {
    LaunchOptions options;
    options.num_ranks = arguments.num_ranks;
    set_train_restarts(arguments, job, options);
  });
  judge([&] { check_launched_restarts(launch, job.config, job.origins); });
  judge([&] { check_requeue(job.config.fault_tolerance); });
  judge([&] { check_plan_device(job.config, job.origins); });
  judge([&] { check_deterministic(job.config, job.origins); });
  judge([&] { check_peer_states(arguments, job.config.checkpoint, launch); });
  for (const std::string& fact : report.facts) print(fact + (fact.ends_with('\n') ? "" : "\n"));
  if (!report.problems.empty()) throw ConfigError(std::move(report.problems));
  return print("nothing keeps this job from starting\n");
}

// Reports why this rank of several fails. The launcher's box shows the rank whose error is the cause, so
// under `titan launch` only that rank says what it is.
[[noreturn]] void report_failure(const std::exception& error, const dist::Launch& launch,
                                 const dist::Explanation& why) {
  const bool is_told_here = why.told_by == launch.rank;
  if (is_told_here && dynamic_cast<const ConfigError*>(&error)) throw;  // main() lists the problems
  if (is_told_here)
    log::error("the job fails: " + reason_of(error));
  else if (why.told_by >= 0 && launch.by == "titan")
    log::info(str("this rank ends because rank ", why.told_by, " failed"));
  else
    log::error("the job fails: " + why.text);
  // With a lost peer's data a rank's loss isn't a number, which would end the run for good (UnsoundRun).
  const Error consequence(reason_of(error));
  if (why.covers_own_error) throw ReportedError{code_of(why.is_about_peer ? consequence : error)};
  if (why.is_about_peer) throw consequence;
  throw;
}

// Explains an out-of-memory error here, where the settings are.
train::RunEnd run_trainer(const train::JobConfig& config, const dist::World& world,
                          const dist::Launch& launch, const train::CheckedFiles& checked,
                          train::StartupWatch& startup) {
  const auto watchdog = train::make_watchdog(config, world);
  // Work of the default stream can't be recorded, and autograd runs a parameter's node on the stream that was
  // current when the parameter was made.
  const dist::Stream usual = dist::Stream::current(world.device());
  const dist::Stream stream = config.compile.enable ? dist::Stream::create(world.device()) : usual;
  const dist::StreamGuard on_stream(stream);
  train::MemoryWitness witness(world.device());
  try {
    train::Trainer trainer = train::build_trainer(config, world, on_terminal(launch), checked, watchdog);
    if (auto plan = build_plan_watch(config, world, trainer.parts()))
      trainer.parts().observers.push_back(std::move(plan));
    witness.know(trainer);
    startup.end();
    return trainer.train();
  } catch (const std::exception& error) {
    if (train::is_out_of_memory(error)) log::error(train::explain_out_of_memory(config, world, witness));
    if (world.size() == 1) throw;
    report_failure(error, launch, watchdog->explain(reason_of(error)));
  }
}

// A run that has done its work doesn't fail because of its last lines, for example if its working directory is
// gone.
void log_next_commands(const train::JobConfig& config, const dist::Launch& launch, int64_t last_step) {
  NextStart next{.last_step = last_step, .ranks = ""};
  if (launch.by == "titan") next.ranks = str(" --nproc ", launch.size);
  if (launch.by == "titan" && launch.max_restarts > 0)
    next.ranks += str(" --max-restarts ", launch.max_restarts);
  try {
    log::info(next_commands(config, next));
  } catch (const std::exception& error) {
    log::warning(str("the commands that report and continue this run can't be named: ", error.what()));
  }
}

// `fake_ranks`: as for train::build_world.
int run_rank(const train::JobConfig& config, const dist::Launch& launch, const train::CheckedFiles& checked,
             int fake_ranks) {
  keep_freed_memory();
  // cuBLAS reads it when its first handle is made.
  if (config.debug.deterministic) {
    ::setenv(kCublasVariable, ":4096:8", /*overwrite=*/0);
    // Sums in NVLink's switches have another order in each call (github.com/NVIDIA/nccl/issues/1497).
    ::setenv("NCCL_NVLS_ENABLE", "0", /*overwrite=*/0);
  }
  // Kineto reads it when it starts. Without a GPU it would log an error; level 5 silences it.
  if (config.profiling.enable_profiling) ::setenv("KINETO_LOG_LEVEL", "5", /*overwrite=*/0);
  if (config.comm.trace_buf_size > 0) dist::survive_sigquit();
  const train::SignalWatch signals(signaling_launcher(launch));
  const auto code_after = [&](const train::StopCause& stop) {
    const int code = code_after_stop(launch, stop);
    // A job that continues by itself isn't put back into the queue.
    if (code == 0 && launch.rank == 0) requeue_if_wanted(config, stop.signal);
    return code;
  };
  train::StartupWatch startup(code_after);
  dist::World world = train::build_world(config, fake_ranks);
  // With states in memory, a stop waits until the newest one is loaded, to save it.
  if (config.checkpoint.peer_interval > 0) {
    startup.end();
  } else {
    startup.join(world);
  }
  if (train::run_has_ended(config, world)) return 0;
  const train::RunEnd end = run_trainer(config, world, launch, checked, startup);
  if (launch.rank == 0) log_next_commands(config, launch, end.step);
  // Stopped during its last validation: all steps are trained and saved.
  if (end.step >= config.training.steps) return 0;
  return code_after(end.stop);
}

}  // namespace

void check_launched_restarts(const dist::Launch& launch, const train::JobConfig& config,
                             const config::Origins& origins) {
  if (launch.max_restarts > 0)
    check_resumable(config, origins, /*must_save=*/launch.by == "titan", /*may_shrink=*/false);
}

int code_after_stop(const dist::Launch& launch, const train::StopCause& stop) {
  if (stop.signal == 0 || !stop.by_launcher || launch.by != "torchrun" || launch.max_restarts == 0) return 0;
  const int code = 128 + stop.signal;
  log::info(str("an agent of torchrun sent ", train::signal_name(stop.signal),
                " to its ranks before the run was finished: exit code ", code,
                ", so that the other agents restart their ranks"));
  return code;
}

int signaling_launcher(const dist::Launch& launch) {
  return launch.by == "titan" || launch.by == "torchrun" ? ::getppid() : 0;
}

int train_command(const Arguments& words) {
  TrainArguments arguments = parse(words);
  LoadedJob job = load_job(arguments);
  if (arguments.num_ranks > 0 && job.config.parallelism.has_auto_degree()) {
    const std::vector<std::string> chosen = choose_degrees(arguments, job.config);
    arguments.overrides.insert(arguments.overrides.end(), chosen.begin(), chosen.end());
    job = load_job(arguments);
  }
  if (arguments.print_config) return print(config::print_toml(train::job_schema(), job.config));
  const dist::Launch launch = dist::read_launch(dist::process_environment());
  if (arguments.print_plan) return print_plan(arguments, job, launch);
  if (arguments.check) return check_only(arguments, job, launch);
  if (arguments.num_ranks > 0 && is_rank_of_a_job(launch))
    throw ConfigError(str("--nproc starts ranks, but this process is itself a rank started by ", launch.by));
  check_train_restarts(arguments, job);
  const int fake_ranks = job.config.comm.mode == "fake_backend" ? std::max(arguments.num_ranks, 1) : 0;
  if (fake_ranks > 0 && (arguments.num_ranks == 0 || is_rank_of_a_job(launch)))
    throw ConfigError(
        "titan train: comm.mode = \"fake_backend\" is for one process, with --nproc N as the number of ranks "
        "to pretend");
  if (fake_ranks > 0 && arguments.restarts.max_restarts > 0)
    throw ConfigError("titan train: --max-restarts has nothing to restart with comm.mode = \"fake_backend\"");
  const bool starts_ranks =
      fake_ranks == 0 && (arguments.num_ranks > 1 || arguments.restarts.max_restarts > 0);
  if (!starts_ranks) check_launched_restarts(launch, job.config, job.origins);
  // The parent checks, too, so that a wrong setting is reported once, before any rank exists.
  if (!starts_ranks) configure_log(job.config, launch);
  const train::CheckedFiles checked = train::check_job(job.config, job.origins,
                                                       fake_ranks > 0 ? fake_ranks
                                                       : starts_ranks ? arguments.num_ranks
                                                                      : launch.size,
                                                       files_to_check(launch));
  check_requeue(job.config.fault_tolerance);
  check_deterministic(job.config, job.origins);
  // Only rank 0 plans, perhaps with a file that only its host has.
  if (starts_ranks || launch.rank == 0) check_plan_device(job.config, job.origins);
  check_peer_states(arguments, job.config.checkpoint, launch);
  // Whether a converter can multiply the parts that tensor parallelism makes shows when they are made.
  if (starts_ranks && !job.config.model.converters.empty() &&
      job.config.parallelism.tensor_parallel_degree > 1)
    train::build_each_stage(job.config, arguments.num_ranks);
  return starts_ranks ? launch_ranks(arguments, job) : run_rank(job.config, launch, checked, fake_ranks);
}

}  // namespace titan::cli

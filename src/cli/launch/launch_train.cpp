#include "cli/launch/launch_train.h"

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/train/parallel_dims.h"
#include "titan/train/run_end.h"
#include "train/policies/interruption.h"

namespace titan::cli {

namespace {

/// Why the job can't run on `num_ranks` ranks; "": it can.
std::string misfit(const train::JobConfig& config, const config::Origins& origins, int num_ranks) {
  try {
    train::check_job(config, origins, num_ranks, train::JobFiles::Ignore);
    return "";
  } catch (const ConfigError& error) {
    return error.problems().front();
  }
}

// A step, perhaps the first one, a save in progress, and the last save.
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
  std::vector<std::string> problems;
  const train::ParallelDims dims =
      train::resolve_parallel_dims(config.parallelism, arguments.num_ranks, problems);
  command.push_back("--validation.global_batch_size");
  command.push_back(std::to_string(validation.local_batch_size * dims.batch_degree()));
}

/// Collects the settings that keep restarted ranks from resuming where the last ones were.
class RestartProblems {
 public:
  RestartProblems(const train::JobConfig& config, const config::Origins& origins)
      : config_(config), origins_(origins) {}

  void require(bool holds, const char* key, const char* what) {
    if (!holds) problems_.push_back(origins_.problem(key, str("with --max-restarts ", what)));
  }
  void find_without_saves() {
    require(config_.checkpoint.enable, "checkpoint.enable",
            "must be true: restarted ranks resume from a checkpoint");
    require(!config_.checkpoint.load_only, "checkpoint.load_only",
            "must be false: otherwise there is no checkpoint to resume from");
  }
  void find_same_start() {
    require(config_.checkpoint.load_step == -1, "checkpoint.load_step",
            "must be -1, the newest: otherwise each restart goes back to this step");
    require(config_.checkpoint.exclude_from_loading.empty(), "checkpoint.exclude_from_loading",
            "must be empty: otherwise each restart leaves these out again");
  }
  void throw_if_any() const {
    if (!problems_.empty()) throw ConfigError(problems_);
  }

 private:
  const train::JobConfig& config_;
  const config::Origins& origins_;
  std::vector<std::string> problems_;
};

}  // namespace

void check_train_restarts(const TrainArguments& arguments, const train::JobConfig& config,
                          const config::Origins& origins) {
  if (arguments.restarts.max_restarts == 0) return;
  if (arguments.num_ranks == 0) throw ConfigError("titan train: --max-restarts needs --nproc");
  RestartProblems problems(config, origins);
  problems.find_without_saves();
  problems.find_same_start();
  const bool may_shrink =
      arguments.restarts.min_ranks > 0 && arguments.restarts.min_ranks < arguments.num_ranks;
  problems.require(
      !may_shrink || config.training.global_batch_size != -1, "training.global_batch_size",
      "and --min-ranks must be a number: with -1 it depends on the number of ranks, so fewer ranks would "
      "train a different run");
  problems.throw_if_any();
}

void check_launched_restarts(const dist::Launch& launch, const train::JobConfig& config,
                             const config::Origins& origins) {
  if (launch.max_restarts == 0) return;
  RestartProblems problems(config, origins);
  if (launch.by == "titan") problems.find_without_saves();
  problems.find_same_start();
  problems.throw_if_any();
}

void set_train_restarts(const TrainArguments& arguments, const train::JobConfig& config,
                        const config::Origins& origins, LaunchOptions& options) {
  options.restarts = arguments.restarts;
  RestartOptions& restarts = options.restarts;
  restarts.fits = [&](int num_ranks) { return misfit(config, origins, num_ranks).empty(); };
  // The ranks' own watchdogs end hangs.
  options.stop_grace = arguments.stop_grace.value_or(longest_stop(config));
  const int most = options.num_ranks - 1, least = restarts.min_ranks;
  if (least == 0 || least > most) return;
  keep_validation(arguments, config, options.command);
  for (int size = most; size >= least; --size)
    if (restarts.fits(size)) return;
  throw ConfigError(str("--min-ranks ", least, ": the job runs on no number of ranks from ", least, " to ",
                        most, ". On ", most, ": ", misfit(config, origins, most)));
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

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kLongestRequeue{30};

/// The signal mask of the program: blocks nothing, unlike this process, whose threads leave signals to the SignalWatch.
class PlainSignals {
 public:
  PlainSignals() {
    ::posix_spawnattr_init(&attributes_);
    sigset_t none, all;
    ::sigemptyset(&none);
    ::sigfillset(&all);
    ::posix_spawnattr_setsigmask(&attributes_, &none);
    ::posix_spawnattr_setsigdefault(&attributes_, &all);
    ::posix_spawnattr_setflags(&attributes_, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  }
  ~PlainSignals() { ::posix_spawnattr_destroy(&attributes_); }
  PlainSignals(const PlainSignals&) = delete;
  PlainSignals& operator=(const PlainSignals&) = delete;
  const posix_spawnattr_t* get() const { return &attributes_; }

 private:
  posix_spawnattr_t attributes_{};
};

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

}  // namespace

// SLURM_JOB_ID of an array's task may also be the number of the whole array.
std::string slurm_job(const dist::Environment& environment) {
  const auto array = environment("SLURM_ARRAY_JOB_ID"), task = environment("SLURM_ARRAY_TASK_ID");
  if (array && task) return str(*array, "_", *task);
  return environment("SLURM_JOB_ID").value_or("");
}

bool requeues_on(const config::StringList& signals, int signal) {
  return signal != 0 && std::count(signals.begin(), signals.end(), train::signal_name(signal)) > 0;
}

void requeue(const std::string& job) {
  const std::string what = "scontrol requeue " + job;
  std::string program = "scontrol", verb = "requeue", argument = job;
  char* words[] = {program.data(), verb.data(), argument.data(), nullptr};
  const PlainSignals signals;
  pid_t child = -1;
  const int error = ::posix_spawnp(&child, "scontrol", nullptr, signals.get(), words, environ);
  TITAN_CHECK(error == 0, what, ": ", std::strerror(error));
  const int status = wait_for_end(child, what);
  TITAN_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, what, " failed (",
              WIFEXITED(status) ? "exit code " : "signal ",
              WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status),
              "): the job is not back in the queue");
  log::info("the job is back in SLURM's queue: " + what);
}

}  // namespace titan::cli

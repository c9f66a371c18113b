#include "cli/train_end.h"

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
#include "train/policies/interruption.h"

namespace titan::cli {

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

/// What the program starts with: none of the signals blocked that this process's threads leave to the watch.
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

// As waitpid tells it.
int wait_for_end(pid_t child, const std::string& what) {
  const auto deadline = Clock::now() + kLongestRequeue;
  int status = 0;
  while (::waitpid(child, &status, WNOHANG) != child) {
    if (Clock::now() > deadline) {
      ::kill(child, SIGKILL);
      ::waitpid(child, &status, 0);
      throw Error(str(what, " hasn't ended within ", kLongestRequeue.count(), " s"));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return status;
}

}  // namespace

// The number of an array's task may be the whole array's too.
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
              WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status), "): the job doesn't start again");
  log::info("the job is back in SLURM's queue: " + what);
}

}  // namespace titan::cli

#include "cli/sweep/runs.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <cerrno>
#include <cstring>

#include <nlohmann/json.hpp>

#include "cli/launch/signals.h"
#include "cli/run/run_history.h"
#include "config/differences.h"
#include "job/checkpoint_job.h"
#include "job/job_config.h"
#include "titan/config/load.h"
#include "titan/core/error.h"
#include "titan/core/file.h"

namespace titan::cli::sweep {

namespace {

constexpr int64_t kEndOfLog = 1 << 20;

std::filesystem::path state_file(const std::filesystem::path& folder) { return folder / "sweep_run.json"; }

// By the rule of `titan train`, with the folder as this process sees it.
bool holds_last_step(const std::filesystem::path& folder) {
  train::JobConfig job;
  config::load(train::job_schema(), {folder / "config.toml", {}}, job);
  job.job.dump_folder = folder.string();
  return train::end_of_run(job).has_value();
}

// Without a log: the steps after the last logged one are fewer than log_freq.
bool trained_all_steps(const std::filesystem::path& folder) {
  const RunHistory run = read_history(folder);
  const std::string freq = run.setting("metrics.log_freq");
  return run.steps.last_step() + (freq.empty() ? 1 : std::stoll(freq)) > run.total_steps();
}

}  // namespace

std::optional<RunState> read_run_state(const std::filesystem::path& folder) {
  const auto file = state_file(folder);
  if (!std::filesystem::exists(file)) return std::nullopt;
  try {
    const auto object = nlohmann::json::parse(read_file(file));
    return RunState{.config = object.at("config"),
                    .finished = object.at("finished"),
                    .exit_code = object.at("exit_code"),
                    .seconds = object.at("seconds"),
                    .attempts = object.at("attempts")};
  } catch (const nlohmann::json::exception& error) {
    throw Error(str(file.string(), " is not a file of titan sweep: ", error.what()));
  }
}

void write_run_state(const std::filesystem::path& folder, const RunState& state) {
  make_folder(folder);
  const nlohmann::ordered_json object = {{"finished", state.finished},
                                         {"exit_code", state.exit_code},
                                         {"seconds", state.seconds},
                                         {"attempts", state.attempts},
                                         {"config", state.config}};
  write_file_atomic(state_file(folder), object.dump(2) + "\n");
}

bool is_finished(const std::filesystem::path& folder, bool told_to_end) {
  if (!std::filesystem::exists(folder / "config.toml")) return false;  // stopped before it began
  if (holds_last_step(folder)) return true;
  const std::vector<ProcessLog> logs = newest_of_ranks(folder, 1, {.tail_bytes = kEndOfLog});
  // The newest process may have been stopped before it had a log; then the previous one wasn't finished either.
  if (!logs.empty()) return end_of(logs.front(), now_us()).kind == ProcessEnd::Kind::Completed;
  return !told_to_end && trained_all_steps(folder);
}

std::vector<std::string> differences_to_folder(const std::filesystem::path& folder,
                                               const std::string& config) {
  if (const auto state = read_run_state(folder)) return config::setting_differences(state->config, config);
  const auto resolved = folder / "config.toml";  // perhaps the run of another command
  if (!std::filesystem::exists(resolved)) return {};
  return config::setting_differences(read_file(resolved), config);
}

namespace {

[[noreturn]] void become(const std::vector<std::string>& command, const HeldSignals& signals, pid_t parent) {
  std::vector<char*> words;
  for (const std::string& word : command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  setpgid(0, 0);  // so that Ctrl-C reaches it once, through us
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  ::signal(SIGQUIT, SIG_IGN);  // it would kill `titan train` until that has a handler
  signals.restore();
  if (getppid() == parent) execv(words.front(), words.data());
  _exit(127);
}

}  // namespace

HeldSignals::HeldSignals() {
  sigemptyset(&set_);
  for (int signal : {SIGCHLD, SIGQUIT}) sigaddset(&set_, signal);
  for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2})
    if (!is_ignored(signal)) sigaddset(&set_, signal);
  pthread_sigmask(SIG_BLOCK, &set_, &before_);
}

HeldSignals::~HeldSignals() { restore(); }

void HeldSignals::restore() const { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

int HeldSignals::wait() const {
  int signal = 0;
  sigwait(&set_, &signal);
  return signal;
}

// The SIGCHLD of a child that has been waited for may still be pending.
std::optional<int> HeldSignals::pending() const {
  const timespec at_once{};
  for (int signal; (signal = sigtimedwait(&set_, nullptr, &at_once)) > 0;)
    if (signal != SIGCHLD && signal != SIGQUIT) return signal;
  return std::nullopt;
}

ChildEnd run_child(const std::vector<std::string>& command, const HeldSignals& signals) {
  const pid_t parent = getpid(), pid = fork();
  TITAN_CHECK(pid >= 0, "cannot start ", command.front(), ": ", std::strerror(errno));
  if (pid == 0) become(command, signals, parent);
  ChildEnd end;
  for (int status = 0;;) {
    if (waitpid(pid, &status, WNOHANG) == pid) {
      end.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      return end;
    }
    const int signal = signals.wait();
    if (signal == SIGCHLD) continue;
    if (signal != SIGQUIT) end.told_to_end = signal;
    kill(pid, signal);
  }
}

}  // namespace titan::cli::sweep

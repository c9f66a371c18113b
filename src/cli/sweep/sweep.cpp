// titan sweep: runs that differ in some settings, one after another.

#include "cli/sweep/sweep.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <c10/util/StringUtil.h>
#include <nlohmann/json.hpp>

#include "cli/launch/process.h"
#include "cli/parser.h"
#include "cli/run_folder.h"
#include "cli/text.h"
#include "config/differences.h"
#include "core/json_tree.h"
#include "job/checkpoint_job.h"
#include "job/job_config.h"
#include "titan/config/load.h"
#include "titan/core/error.h"
#include "titan/core/file.h"
#include "titan/core/log.h"

namespace titan::cli::sweep {

namespace {

constexpr int64_t kEndOfLog = 1 << 20;

std::filesystem::path state_file(const std::filesystem::path& folder) { return folder / "sweep_run.json"; }

// Applies the rule of `titan train`, with the folder as this process sees it.
bool holds_last_step(const std::filesystem::path& folder) {
  train::JobConfig job;
  config::load(train::job_schema(), {folder / "config.toml", {}}, job);
  job.job.dump_folder = folder.string();
  return train::end_of_run(job).has_value();
}

// Without a log: the steps after the last logged one are fewer than log_freq.
bool trained_all_steps(const std::filesystem::path& folder) {
  const RunFolder run = read_run_folder(folder);
  const std::string freq = run.setting("metrics.log_freq");
  return run.steps.last_step() + (freq.empty() ? 1 : std::stoll(freq)) > run.total_steps();
}

struct RunState {
  std::string config;  ///< resolved, as TOML
  bool finished = false;
  int exit_code = 0;   ///< of the last attempt
  double seconds = 0;  ///< of all attempts
  int attempts = 0;
};

/// None: the sweep hasn't started this run. Throws Error for a file that titan sweep didn't write.
std::optional<RunState> read_run_state(const std::filesystem::path& folder) {
  const auto file = state_file(folder);
  if (!std::filesystem::exists(file)) return std::nullopt;
  std::string problem;
  const auto object = parse_json(read_file(file), &problem);
  if (!problem.empty()) throw Error(str(file.string(), " is not a file of titan sweep: ", problem));
  try {
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
  write_file_atomic(state_file(folder), json_text(object, 2) + "\n");
}

}  // namespace

bool is_finished(const std::filesystem::path& folder, bool told_to_end) {
  if (!std::filesystem::exists(folder / "config.toml")) return false;  // stopped before it began
  if (holds_last_step(folder)) return true;
  const std::vector<ProcessLog> logs = newest_of_ranks(folder, 1, {.tail_bytes = kEndOfLog});
  // The newest process may have been stopped before it had a log; then the previous one wasn't finished either.
  if (!logs.empty()) return end_of(logs.front(), now_us()).kind == ProcessEnd::Kind::Completed;
  return !told_to_end && trained_all_steps(folder);
}

namespace {

/// Settings in which this run and the one in its folder differ, like "training.seq_len: 16 | 24"; none if the
/// folder holds no run.
std::vector<std::string> differences_to_folder(const std::filesystem::path& folder,
                                               const std::string& config) {
  if (const auto state = read_run_state(folder)) return config::setting_differences(state->config, config);
  const auto resolved = folder / "config.toml";  // perhaps the run of another command
  if (!std::filesystem::exists(resolved)) return {};
  return config::setting_differences(read_file(resolved), config);
}

/// While it lives, signals that end a sweep or are passed on to its run stay pending: SIGINT, SIGTERM, SIGHUP,
/// SIGUSR1 and SIGUSR2 (SLURM's --signal), unless this process was started to ignore them; and SIGQUIT (which
/// asks ranks what they are doing).
class HeldSignals {
 public:
  HeldSignals() : set_(launcher_signals()) { pthread_sigmask(SIG_BLOCK, &set_, &before_); }

  ~HeldSignals() { restore(); }
  HeldSignals(const HeldSignals&) = delete;
  HeldSignals& operator=(const HeldSignals&) = delete;

  /// A signal that has come and asks for the end; doesn't wait.
  // The SIGCHLD of a child that has been waited for may still be pending.
  std::optional<int> pending() const {
    const timespec at_once{};
    for (int signal; (signal = sigtimedwait(&set_, nullptr, &at_once)) > 0;)
      if (signal != SIGCHLD && signal != SIGQUIT) return signal;
    return std::nullopt;
  }

  /// Waits for the next signal, or SIGCHLD.
  int wait() const {
    int signal = 0;
    sigwait(&set_, &signal);
    return signal;
  }

  /// Restores the signal mask, in a process that is about to become another program.
  void restore() const { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t set_, before_{};
};

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

struct ChildEnd {
  int exit_code = 0;    ///< 128 + signal, if a signal ended it
  int told_to_end = 0;  ///< the signal that this process received meanwhile and passed on
};

/// Runs a program with this process's output, and waits for it. Passes signals on. The program dies with this
/// process. Throws Error when it can't be started.
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

constexpr const char* kSweepNotes =
    R"(FILE is TOML: base = a config, folder = where the runs go, nproc = ranks of each run; [set] settings of all
runs, [grid] lists of values (every combination is run), [run.NAME] settings of a named run.

All runs are checked before the first one starts. When the command is given again, finished runs are
skipped; a run that was killed or failed is started again, and resumes from its checkpoints if it has any.
At the end, prints a line per run and the tables of titan compare.

In a SLURM job array (sbatch --array=0-N), each task does the run with its index.
)";

// --only, or this task's index in a SLURM job array.
std::optional<size_t> chosen_index(std::optional<int> only, size_t num_runs) {
  const char* task = std::getenv("SLURM_ARRAY_TASK_ID");
  if (!only && !task) return std::nullopt;
  const std::string text = only ? std::to_string(*only) : task;
  char* end = nullptr;
  const long index = std::strtol(text.c_str(), &end, 10);
  if (*end != '\0' || text.empty() || index < 0 || static_cast<size_t>(index) >= num_runs)
    throw ConfigError(str(only ? "--only " : "SLURM_ARRAY_TASK_ID = ", text, ": the sweep has ", num_runs,
                          " runs, with indices 0 to ", num_runs - 1, " (sbatch --array=0-", num_runs - 1,
                          ")"));
  return static_cast<size_t>(index);
}

/// A sweep whose runs have been checked.
class Sweep {
 public:
  /// `only`: for the other runs only the settings are checked.
  Sweep(Plan plan, std::optional<size_t> only) : plan_(std::move(plan)), configs_(check_runs(plan_, only)) {
    // A run's folder must not hold a run with other settings.
    std::vector<std::string> problems;
    for (size_t i = 0; i < plan_.runs.size(); ++i) {
      if (only && *only != i) continue;
      const auto differences = differences_to_folder(folder(i), configs_[i]);
      if (!differences.empty())
        problems.push_back(str(folder(i).string(), " holds a run with other settings (",
                               c10::Join(", ", differences),
                               "); remove it, or set another folder in the sweep's file"));
    }
    if (!problems.empty()) throw ConfigError(problems);
  }

  const std::vector<Run>& runs() const { return plan_.runs; }
  bool finished(size_t index) const {
    const auto state = read_run_state(folder(index));
    return state && state->finished;
  }
  /// Returns the signal that ended the sweep; 0: none.
  int do_run(size_t index, const HeldSignals& signals) {
    const std::string place =
        str("run ", index, " of ", plan_.runs.size(), " (", plan_.runs[index].name, ")");
    RunState state = read_run_state(folder(index)).value_or(RunState{});
    if (state.finished) {
      log::info(place + " is finished already");
      return 0;
    }
    log::info(str(place, state.attempts > 0 ? " starts again" : " starts"));
    state.config = configs_[index];
    ++state.attempts;
    write_run_state(folder(index), state);
    const auto start = std::chrono::steady_clock::now();
    const ChildEnd end = run_child(command(index), signals);
    state.seconds += seconds_since(start);
    state.exit_code = end.exit_code;
    // A run also exits with 0 if anyone asked it to stop.
    state.finished = end.exit_code == 0 && is_finished(folder(index), end.told_to_end != 0);
    write_run_state(folder(index), state);
    if (end.exit_code != 0) log::warning(str(place, " ended with exit code ", end.exit_code));
    if (end.exit_code == 0 && !state.finished) log::warning(str(place, " was stopped before its end"));
    return end.told_to_end;
  }

  std::string summary() const {
    TextTable table{.rows = {{"", "run", "state", "step", "loss", "validation", "tokens/s", "seconds"}},
                    .right = {true, false, false, true, true, true, true, true}};
    for (size_t i = 0; i < plan_.runs.size(); ++i) {
      const auto state = read_run_state(folder(i));
      const MetricRows steps(folder(i) / "metrics.jsonl"), validations(folder(i) / "validation.jsonl");
      const std::string words = !state                  ? "not started"
                                : state->finished       ? "finished"
                                : state->exit_code != 0 ? str("exit code ", state->exit_code)
                                                        : "not finished";
      table.rows.push_back(
          {std::to_string(i), plan_.runs[i].name, words,
           steps.empty() ? "" : std::to_string(steps.last_step()), number_or_none("%.5f", steps.last("loss")),
           number_or_none("%.5f", validations.last("loss")), number_or_none("%.0f", steps.last("tps")),
           state ? number("%.1f", state->seconds) : ""});
    }
    return to_string(table);
  }

  /// The folders of the finished runs.
  std::vector<std::string> folders() const {
    std::vector<std::string> done;
    for (size_t i = 0; i < plan_.runs.size(); ++i)
      if (finished(i)) done.push_back(folder(i).string());
    return done;
  }

 private:
  std::filesystem::path folder(size_t index) const { return plan_.folder_of(plan_.runs[index]); }
  std::vector<std::string> command(size_t index) const {
    std::vector<std::string> words = {std::filesystem::read_symlink("/proc/self/exe").string(), "train"};
    if (!plan_.base.empty()) words.push_back(plan_.base.string());
    if (plan_.num_ranks > 1) words.insert(words.end(), {"--nproc", std::to_string(plan_.num_ranks)});
    const std::vector<std::string> settings = plan_.setting_words(plan_.runs[index]);
    words.insert(words.end(), settings.begin(), settings.end());
    return words;
  }

  Plan plan_;
  std::vector<std::string> configs_;
};

int print_end(const Sweep& sweep) {
  std::printf("%s", sweep.summary().c_str());
  const std::vector<std::string> done = sweep.folders();
  if (done.size() > 1) {
    std::printf("\n");
    std::fflush(stdout);
    compare_command(done);
  }
  return done.size() == sweep.runs().size() ? 0 : 1;
}

}  // namespace

}  // namespace titan::cli::sweep

namespace titan::cli {

int sweep_command(const Arguments& words) {
  using namespace sweep;
  std::filesystem::path file;
  std::optional<int> given;
  bool list = false;
  Parser parser("titan sweep", "FILE [--list] [--only INDEX]", kSweepNotes);
  parser.path("FILE", file, "the file that describes the runs");
  parser.flag("--list", list, "check and print the runs and their state; start nothing");
  parser.app
      .add_option("--only", given, "only the run with this index, from 0 (default: SLURM_ARRAY_TASK_ID)")
      ->type_name("INDEX");
  parser.parse(words);
  Plan plan = read_plan(file);
  const auto only = chosen_index(given, plan.runs.size());
  Sweep sweep(std::move(plan), only);
  if (list) return print(sweep.summary());
  const HeldSignals signals;  // signals would kill this process between two runs, too
  for (size_t i = 0; i < sweep.runs().size(); ++i) {
    if (only && *only != i) continue;
    if (const auto signal = signals.pending()) return 128 + *signal;
    if (const int signal = sweep.do_run(i, signals)) return 128 + signal;
  }
  // A task of an array reports its own run only; the tables come when all runs are finished.
  if (only && sweep.folders().size() < sweep.runs().size()) return sweep.finished(*only) ? 0 : 1;
  return print_end(sweep);
}

}  // namespace titan::cli

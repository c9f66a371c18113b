#pragma once

// A sweep: a file that describes runs, the state of each run in its folder (sweep_run.json), and the process that
// does it. The file:
//
//   base = "../llama3_debug.toml"   # config of all runs, relative to this file
//   folder = "outputs/sweep"        # one folder per run in here; default: outputs/<this file's name>
//   nproc = 2                       # ranks of each run; default 1
//
//   [set]                           # settings of all runs
//   training.steps = 100
//
//   [grid]                          # every combination
//   optimizer.lr = [1e-3, 3e-4]
//   training.seq_len = [128, 256]
//
//   [run.plain]                     # instead or in addition: named runs; each runs at every grid point
//   optimizer.weight_decay = 0.0

#include <signal.h>

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace titan::cli::sweep {

/// Full name -> value, as the command line takes it.
using Setting = std::pair<std::string, std::string>;

struct Run {
  std::string name;  ///< its folder's name: "plain,lr=0.001,seq_len=128"
  std::vector<Setting> settings;
};

struct Plan {
  std::filesystem::path base;  ///< empty: defaults
  std::filesystem::path folder;
  int num_ranks = 1;
  std::vector<Run> runs;

  std::filesystem::path folder_of(const Run& run) const { return folder / run.name; }
  /// The arguments of `titan train` for this run, without --nproc.
  std::vector<std::string> train_words(const Run& run) const;
};

/// Throws ConfigError with everything that is wrong with the file itself. check_runs() checks the settings.
Plan read_plan(const std::filesystem::path& file);

/// Checks every run as `titan train` does: throws one ConfigError with each problem and the runs that have it.
/// Returns the resolved config of each run, as TOML. `only`: checks the existence of files for this run only,
/// as a task of a job array does.
std::vector<std::string> check_runs(const Plan& plan, std::optional<size_t> only = {});

struct RunState {
  std::string config;  ///< resolved, as TOML
  bool finished = false;
  int exit_code = 0;   ///< of the last attempt
  double seconds = 0;  ///< of all attempts
  int attempts = 0;
};

/// None: the sweep hasn't started this run. Throws Error for a file that titan sweep didn't write.
std::optional<RunState> read_run_state(const std::filesystem::path& folder);
void write_run_state(const std::filesystem::path& folder, const RunState& state);

/// Whether a run that ended with exit code 0 is finished: its own log says so, or its checkpoints hold its last
/// step, after which `titan train` has nothing left to do. `told_to_end`: this process passed a signal on to
/// it; this decides for a run that keeps neither logs nor checkpoints.
bool is_finished(const std::filesystem::path& folder, bool told_to_end);

/// Settings in which this run and the one in its folder differ, like "training.seq_len: 16 | 24"; none if the
/// folder holds no run.
std::vector<std::string> differences_to_folder(const std::filesystem::path& folder,
                                               const std::string& config);

/// While it lives, signals that end a sweep or are passed on to its run stay pending: SIGINT, SIGTERM, SIGHUP,
/// SIGUSR1 and SIGUSR2 (SLURM's --signal), unless this process was started to ignore them; and SIGQUIT (which
/// asks ranks what they are doing).
class HeldSignals {
 public:
  HeldSignals();
  ~HeldSignals();
  HeldSignals(const HeldSignals&) = delete;
  HeldSignals& operator=(const HeldSignals&) = delete;

  /// A signal that has come and asks for the end; doesn't wait.
  std::optional<int> pending() const;
  /// Waits for the next signal, or SIGCHLD.
  int wait() const;
  /// Restores the signal mask, in a process that is about to become another program.
  void restore() const;

 private:
  sigset_t set_{}, before_{};
};

struct ChildEnd {
  int exit_code = 0;    ///< 128 + signal, if a signal ended it
  int told_to_end = 0;  ///< the signal that this process received meanwhile and passed on
};

/// Runs a program with this process's output, and waits for it. Passes signals on. The program dies with this
/// process. Throws Error when it can't be started.
ChildEnd run_child(const std::vector<std::string>& command, const HeldSignals& signals);

}  // namespace titan::cli::sweep

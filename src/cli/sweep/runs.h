#pragma once

// What a sweep remembers of a run, in its folder: sweep_run.json.

#include <signal.h>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace titan::cli::sweep {

struct RunState {
  std::string config;  ///< resolved, as TOML
  bool finished = false;
  int exit_code = 0;   ///< of the last attempt
  double seconds = 0;  ///< of all attempts
  int attempts = 0;
};

/// None: the sweep hasn't started this run. Throws Error for a file that isn't one of ours.
std::optional<RunState> read_run_state(const std::filesystem::path& folder);
void write_run_state(const std::filesystem::path& folder, const RunState& state);

/// Of a run that ended with exit code 0: it came to its end, by its own log, or its checkpoints hold its last
/// step, behind which `titan train` does nothing more, whenever it was told to stop. `told_to_end`: this
/// process has passed a signal on to it, which a run that keeps neither says nothing about.
bool went_through(const std::filesystem::path& folder, bool told_to_end);

/// Settings of this run that the one in its folder doesn't share, "training.seq_len: 16 | 24" each; none
/// where the folder holds no run.
std::vector<std::string> differences_to_folder(const std::filesystem::path& folder,
                                               const std::string& config);

/// What ends a sweep, or is passed on to its run, waits in place of being delivered as long as the object
/// lives: SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 (SLURM's --signal), unless this process was started to
/// ignore them; SIGQUIT (which asks ranks for what they are at).
class HeldSignals {
 public:
  HeldSignals();
  ~HeldSignals();
  HeldSignals(const HeldSignals&) = delete;
  HeldSignals& operator=(const HeldSignals&) = delete;

  /// One that has come and asks for the end, without waiting.
  std::optional<int> pending() const;
  /// The next one, or SIGCHLD.
  int wait() const;
  /// As before the object, in a process that is about to become another program.
  void restore() const;

 private:
  sigset_t set_{}, before_{};
};

struct ChildEnd {
  int exit_code = 0;    ///< 128 + signal where one ended it
  int told_to_end = 0;  ///< the signal that this process was sent meanwhile, and passed on
};

/// Runs a program with this process's output, and waits for it. Signals are passed on; the program dies with
/// this process. Throws Error when it can't be started.
ChildEnd run_child(const std::vector<std::string>& command, const HeldSignals& signals);

}  // namespace titan::cli::sweep

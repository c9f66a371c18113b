#pragma once

#include <signal.h>

#include <optional>
#include <string>
#include <vector>

namespace titan::cli::sweep {

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

#pragma once

// A launcher's signals. It reads its own from a descriptor, so that one poll sees a child's end, a Ctrl-C and
// a line of output. It sends some signals only to processes that handle them.

#include <signal.h>
#include <sys/types.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "titan/core/error.h"

namespace titan::cli {

/// From /proc: "D (disk sleep)"; "unknown" if there is no such process.
std::string process_state(pid_t pid);

/// Writes all of `text`; gives up silently when the reader is gone.
void write_all(int fd, std::string_view text);

/// Prints a line of the launcher to standard error.
template <class... Parts>
void tell(const Parts&... parts) {
  write_all(STDERR_FILENO, str("titan launch: ", parts..., "\n"));
}

/// Two signals within this time are one request: a closing terminal sends two, and so do `timeout` and
/// systemd.
inline constexpr std::chrono::seconds kSameSignal{1};

/// Whether this process ignores `signal`, as under nohup or in a shell's background. If such a signal were
/// blocked, it would still be delivered to a descriptor.
bool is_ignored(int signal);
/// The signals that end a launcher or are passed on to its ranks, without those that this process was started
/// to ignore; SIGCHLD; and SIGQUIT, which ends nothing, and which shells ignore for background jobs.
sigset_t launcher_signals();
/// Whether a signal that a SignalReader reads asks for the job's end.
bool asks_for_end(int signal);

/// While it lives, the launcher's signals stay pending until they are read. Signals that this process was
/// started to ignore stay ignored, except SIGQUIT, which ends nothing and which shells ignore for background
/// jobs. At most one object at a time. SIGTSTP (Ctrl-Z) stops this process when it is read.
class SignalReader {
 public:
  SignalReader();
  ~SignalReader();
  SignalReader(const SignalReader&) = delete;
  SignalReader& operator=(const SignalReader&) = delete;

  int fd() const { return fd_; }
  /// The next signal, or 0. SIGHUP is returned as SIGTERM: hanging up means an orderly end. SIGTSTP isn't
  /// returned: this call stops the process until it is continued, and calls `around_stop` before (true) and
  /// after (false). Where nobody could continue it (an orphaned process group) the kernel doesn't stop it.
  int next() const;
  std::function<void(bool stops)> around_stop;

 private:
  int fd_ = -1;
  sigset_t before_{};
  sighandler_t pipe_action_ = SIG_DFL;
  sighandler_t child_action_ = SIG_DFL;
};

/// For work that a first request to end lets complete, and a second one aborts.
class SecondRequest {
 public:
  using Clock = std::chrono::steady_clock;
  /// `first`: when the first request came; unset: it hasn't yet.
  explicit SecondRequest(std::optional<Clock::time_point> first) : first_(first) {}
  /// Reads the signals that have come since.
  bool has_come(const SignalReader& signals);

 private:
  std::optional<Clock::time_point> first_;
  bool has_come_ = false;
};

/// Whether the process handles `signal`, by /proc: it has a handler, or its first thread blocks this signal
/// but not all signals (to read it from a descriptor). A signal that requests something would end a program
/// that doesn't handle it: a rank that has just started, or a shell around it.
bool takes(pid_t pid, int signal);

/// Sends `signal` to the processes of a process group that handle it. Returns their number.
int signal_takers(pid_t group, int signal);

}  // namespace titan::cli

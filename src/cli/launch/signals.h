#pragma once

// The launcher's signals as reads of a descriptor, so that a child's end, a Ctrl-C and a line of output all
// come through one poll.

#include <signal.h>
#include <sys/types.h>
#include <chrono>
#include <optional>

namespace titan::cli {

/// Two signals within it are one request: a terminal that closes sends two, so does `timeout`, and systemd.
inline constexpr std::chrono::seconds kSameSignal{1};

/// As nohup, and a shell for what runs in its background, have it. Blocked, such a signal would nevertheless
/// be kept to be read.
bool is_ignored(int signal);
/// Of those that a SignalReader reads: the job is to end.
bool asks_for_end(int signal);

/// As long as it lives, the signals that matter to a launcher do nothing but wait to be read. Those that this
/// process was started to ignore do nothing at all; but SIGQUIT, which ends nothing, and which shells ignore
/// for all that runs in their background. One at a time.
class SignalReader {
 public:
  SignalReader();
  ~SignalReader();
  SignalReader(const SignalReader&) = delete;
  SignalReader& operator=(const SignalReader&) = delete;

  int fd() const { return fd_; }
  /// The next signal, 0 when there is none. SIGHUP comes as SIGTERM: who hangs up wants an orderly end.
  int next() const;

 private:
  int fd_ = -1;
  sigset_t before_{};
  sighandler_t pipe_action_ = SIG_DFL;
  sighandler_t child_action_ = SIG_DFL;
};

/// While something is done that a first request to end lets come to its end, and a second one doesn't.
class SecondRequest {
 public:
  using Clock = std::chrono::steady_clock;
  /// `first`: when the first came; unset: it hasn't yet.
  explicit SecondRequest(std::optional<Clock::time_point> first) : first_(first) {}
  /// Reads what has come since.
  bool has_come(const SignalReader& signals);

 private:
  std::optional<Clock::time_point> first_;
  bool has_come_ = false;
};

// Signals that ask a program for something, and would end one that has no handler for them: a rank in its
// first moments, a shell around it.

/// Whether the process has a handler for `signal`, or its first thread blocks it and not all signals (which
/// is how one reads signals from a descriptor), as /proc says; false where there is no such process.
bool takes(pid_t pid, int signal);

/// Sends `signal` to those processes of a process group that take it. Returns how many.
int signal_takers(pid_t group, int signal);

}  // namespace titan::cli

#pragma once

// A rank's process: starting it, reading its output, and signals. The launcher reads its own signals from a
// descriptor, so that one poll sees a child's end, a Ctrl-C and a line of output. It sends some signals only to
// processes that handle them.

#include <signal.h>
#include <sys/types.h>
#include <unistd.h>

#include <chrono>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "titan/core/error.h"

namespace titan::cli {

/// Environment variables of a child, added to this process's.
using Variables = std::map<std::string, std::string>;

struct ChildSpec {
  std::vector<std::string> command;
  Variables set;
  std::vector<std::string> unset;
  int inherited_fd = -1;  ///< stays open in the child
};

struct Child {
  pid_t pid = -1;
  int stdout_fd = -1;  ///< reading ends of its pipes, owned by the caller
  int stderr_fd = -1;
  int exec_errno = 0;  ///< not 0: the program couldn't be started; its process has ended
};

/// Starts the program in its own process group, with no signal blocked and empty standard input. It is killed
/// when this process ends. Throws Error when no process or pipe is available.
Child start_child(const ChildSpec& spec);

/// A socket that listens on a free port of 127.0.0.1, or of ::1 if there is no such address.
struct ListeningSocket {
  ListeningSocket();  ///< throws Error
  ~ListeningSocket();
  ListeningSocket(const ListeningSocket&) = delete;
  ListeningSocket& operator=(const ListeningSocket&) = delete;
  int fd = -1;
  std::string host;
  int port = 0;

 private:
  template <class Address>
  bool listen_at(Address* address);
};

/// From /proc: "D (disk sleep)"; "unknown" if there is no such process.
std::string process_state(pid_t pid);

/// The number of cores that this process may use.
int num_cores();

/// Which ranks' lines are shown.
class ShownRanks {
 public:
  /// "0", "0,3", "all" or "none"; throws ConfigError for others.
  ShownRanks(const std::string& text, int num_ranks);
  bool contains(int rank) const { return all_ || ranks_.count(rank) != 0; }

 private:
  bool all_ = false;
  std::set<int> ranks_;
};

/// The last lines of one rank, from both its streams, for the report of a failure.
class Tail {
 public:
  void add(std::string_view line);
  const std::deque<std::string>& lines() const { return lines_; }

 private:
  std::deque<std::string> lines_;
};

/// One stream of one rank (the non-blocking reading end of a pipe), in whole lines. Owns the descriptor.
class OutputPipe {
 public:
  /// `target`: the descriptor to write tagged lines to; -1: only keep the tail.
  OutputPipe(int fd, int target, int rank, Tail& tail);
  OutputPipe(OutputPipe&& other) noexcept;
  OutputPipe& operator=(OutputPipe&&) = delete;
  ~OutputPipe();

  int fd() const { return fd_; }  ///< -1 after the end
  /// Passes on what is available now.
  void drain();

 private:
  void take(std::string_view bytes);
  void finish();

  int fd_;
  int target_;
  std::string tag_;
  std::string partial_;  // an incomplete line
  Tail* tail_;
};

/// Writes all of `text`; gives up silently when the reader is gone.
void write_all(int fd, std::string_view text);

/// Prints a line of the launcher to standard error.
template <class... Parts>
void tell(const Parts&... parts) {
  write_all(STDERR_FILENO, str("titan launch: ", parts..., "\n"));
}

/// Two signals within this time are one request: a closing terminal sends two, and so do `timeout` and systemd.
inline constexpr std::chrono::seconds kSameSignal{1};

/// Whether this process ignores `signal`, as under nohup or in a shell's background. If such a signal were
/// blocked, it would still be delivered to a descriptor.
bool is_ignored(int signal);
/// The signals that end a launcher or are passed on to its ranks, without those that this process was started to ignore;
/// SIGCHLD; and SIGQUIT, which ends nothing, and which shells ignore for background jobs.
sigset_t launcher_signals();
/// Whether a signal that a SignalReader reads asks for the job's end.
bool asks_for_end(int signal);

/// While it lives, the launcher's signals stay pending until they are read. Signals that this process was started
/// to ignore stay ignored, except SIGQUIT, which ends nothing and which shells ignore for background jobs. At
/// most one object at a time.
class SignalReader {
 public:
  SignalReader();
  ~SignalReader();
  SignalReader(const SignalReader&) = delete;
  SignalReader& operator=(const SignalReader&) = delete;

  int fd() const { return fd_; }
  /// The next signal, or 0. SIGHUP is returned as SIGTERM: hanging up means an orderly end.
  int next() const;

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

/// Whether the process handles `signal`, by /proc: it has a handler, or its first thread blocks this signal but
/// not all signals (to read it from a descriptor). A signal that asks a program for something would end one
/// that doesn't handle it: a rank that has just started, or a shell around it.
bool takes(pid_t pid, int signal);

/// Sends `signal` to the processes of a process group that handle it. Returns how many.
int signal_takers(pid_t group, int signal);

}  // namespace titan::cli

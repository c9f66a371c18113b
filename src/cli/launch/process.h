#pragma once

// A rank's process: starting it, and reading its output.

#include <sys/types.h>
#include <unistd.h>
#include <deque>
#include <map>
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

}  // namespace titan::cli

#pragma once

// One rank's process, at the level of the operating system.

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

/// Variables of a child, on top of this process's.
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
  int exec_errno = 0;  ///< not 0: the program couldn't be started, and its process has ended
};

/// Starts the program in a process group of its own, with no signal blocked; it is killed when the calling
/// thread's process ends. Standard input is empty. Throws Error where there is no process or pipe to be had.
Child start_child(const ChildSpec& spec);

/// A socket that listens on a free port of 127.0.0.1, or where there is no such address of ::1.
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

/// As /proc has it: "D (disk sleep)"; "unknown" where there is no such process.
std::string process_state(pid_t pid);

/// Cores that this process may run on.
int num_cores();

// What the ranks print: whole lines, tagged, and the last ones of each kept for the report of a failure.

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

/// The last lines of one rank, of both its streams as they came.
class Tail {
 public:
  void add(std::string_view line);
  const std::deque<std::string>& lines() const { return lines_; }

 private:
  std::deque<std::string> lines_;
};

/// One stream (a pipe's reading end, not blocking) of one rank. Owns the descriptor.
class OutputPipe {
 public:
  /// `target`: the descriptor to write tagged lines to, -1 to keep the tail only.
  OutputPipe(int fd, int target, int rank, Tail& tail);
  OutputPipe(OutputPipe&& other) noexcept;
  OutputPipe& operator=(OutputPipe&&) = delete;
  ~OutputPipe();

  int fd() const { return fd_; }  ///< -1 after the end
  /// Passes on what is there now.
  void drain();

 private:
  void take(std::string_view bytes);
  void finish();

  int fd_;
  int target_;
  std::string tag_;
  std::string partial_;  // a line whose end hasn't come
  Tail* tail_;
};

/// Writes all of it; gives up silently when the reader is gone.
void write_all(int fd, std::string_view text);

/// A line of the launcher's own, on standard error.
template <class... Parts>
void tell(const Parts&... parts) {
  write_all(STDERR_FILENO, str("titan launch: ", parts..., "\n"));
}

}  // namespace titan::cli

#pragma once

// What the ranks print: whole lines, tagged, and the last ones of each kept for the report of a failure.

#include <unistd.h>

#include <deque>
#include <set>
#include <string>
#include <string_view>

#include "titan/core/error.h"

namespace titan::cli {

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

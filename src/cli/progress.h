#pragma once

#include <chrono>
#include <cstdint>

namespace titan::cli {

/// One line on the terminal, written over itself; without a terminal nothing.
class Progress {
 public:
  Progress();
  ~Progress();  ///< ends the line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Ten times a second at most. By one thread at a time.
  void show(int64_t bytes, int64_t total);

 private:
  using Clock = std::chrono::steady_clock;
  bool shows_, shown_ = false;
  Clock::time_point start_ = Clock::now(), last_;
};

}  // namespace titan::cli

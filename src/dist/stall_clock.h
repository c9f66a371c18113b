#pragma once

// How long something hasn't moved, by looks at it now and then.

#include <algorithm>
#include <chrono>
#include <optional>

namespace titan::dist {

using Milliseconds64 = std::chrono::duration<int64_t, std::milli>;

/// A look that comes much later than the last one counts as `longest_gap` only: the whole process stood
/// still, and what it looks at wasn't seen standing.
class StallClock {
 public:
  using Clock = std::chrono::steady_clock;

  /// `moved`: since the last look.
  void look(Clock::time_point now, bool moved, Milliseconds64 longest_gap) {
    const auto gap = last_ ? std::chrono::duration_cast<Milliseconds64>(now - *last_) : Milliseconds64(0);
    last_ = now;
    stalled_ = moved ? Milliseconds64(0) : stalled_ + std::min(gap, longest_gap);
  }
  Milliseconds64 stalled() const { return stalled_; }

 private:
  std::optional<Clock::time_point> last_;
  Milliseconds64 stalled_{0};
};

}  // namespace titan::dist

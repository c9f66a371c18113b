#pragma once

// How long something hasn't moved, by looks at it now and then.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "titan/guard/watchdog.h"

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

/// What the training thread says that it is at, read by another one. Who reads a phase also sees that it has
/// begun: a new phase's limit never meets the time that the one before it took.
class ProgressCell {
 public:
  struct Reading {
    ProgressKind kind;
    const char* what;
    int64_t step;
    uint64_t count;  ///< of what was told, this or more
  };

  void tell() { count_.fetch_add(1, std::memory_order_release); }
  void tell(ProgressKind kind, const char* what, int64_t step) {
    tell();
    step_.store(step, std::memory_order_release);
    what_.store(what, std::memory_order_release);
    kind_.store(kind, std::memory_order_release);
  }
  Reading read() const {
    Reading reading{};
    reading.kind = kind_.load(std::memory_order_acquire);
    reading.what = what_.load(std::memory_order_acquire);
    reading.step = step_.load(std::memory_order_acquire);
    reading.count = count_.load(std::memory_order_acquire);
    return reading;
  }

 private:
  std::atomic<ProgressKind> kind_{ProgressKind::Idle};
  std::atomic<const char*> what_{"start"};
  std::atomic<int64_t> step_{-1};
  std::atomic<uint64_t> count_{0};
};

// What ranks tell of themselves, and what follows from it: no threads, no store, no clock.

/// What a rank tells the others each time.
struct Beat {
  int64_t number = 0;  ///< counts up
  ProgressKind kind = ProgressKind::Idle;
  std::string what;  ///< "forward_backward"
  int64_t step = -1;
  int64_t stalled_ms = 0;        ///< without a sign of going on
  int64_t limit_ms = 0;          ///< of its kind of progress
  std::string setting;           ///< which sets that
  int64_t silence_limit_ms = 0;  ///< of the time without a beat: these come whatever a rank is at
  std::string silence_setting;
  std::string call;  ///< of its peers that it waits for; "": none
  int pid = 0;
  std::string host;
  std::string pids;       ///< which numbers of processes its pid is one of: equal where /proc shows both
  bool computes = false;  ///< its processors work, which is no sign of going on any more
  bool traced = false;    ///< by a debugger
  bool left = false;      ///< it ends, or has no watchdog any more
};

std::string to_text(const Beat& beat);
/// Throws Error.
Beat beat_from(std::string_view text);

/// What is known of a rank.
struct RankView {
  int rank = 0;
  std::optional<Beat> beat;  ///< its last; none: it hasn't begun
  int64_t silent_ms = 0;     ///< since that came
  std::string process;       ///< how /proc has it, where it is on this host: "stopped", "gone"; else ""
  /// Since the watcher last saw a rank for which others may have to wait. A wait counts from there: it lasts
  /// longer than the excuse by as much as beats are old.
  int64_t unexcused_ms = std::numeric_limits<int64_t>::max();
};

struct Verdict {
  std::string text;                ///< one line
  std::vector<int> silent = {};    ///< ranks that can't be expected to do anything
  std::vector<int> culprits = {};  ///< silent ones among them
};

/// Whether one of them may be waited for: it loads data, saves, validates, or is debugged.
bool has_excuse(const std::vector<RankView>& ranks, int64_t interval_ms);

/// None: the job goes on. `size`: of the world, of which `ranks` may be a part; `interval_ms`: between beats.
std::optional<Verdict> judge(const std::vector<RankView>& ranks, int size, int64_t interval_ms);

}  // namespace titan::dist

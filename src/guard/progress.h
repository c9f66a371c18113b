#pragma once

// This rank's signs of progress ([Note: watchdog]), the beats in which ranks report them, and the verdict
// that follows. Beats and verdicts use no thread, no store and no clock.

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

class FlightRecorder;

using Milliseconds64 = std::chrono::duration<int64_t, std::milli>;

/// Measures how long something hasn't moved, from occasional looks at it. A look much later than the one
/// before counts only as `longest_gap`: the whole process stood still, so it saw nothing in that time.
class StallClock {
 public:
  using Clock = std::chrono::steady_clock;

  /// `moved`: whether it moved since the last look.
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

/// The phase that the training thread reports, read by another thread. A reader that sees a phase also sees
/// that it has begun: a new phase's limit never applies to the time that the phase before it took.
class ProgressCell {
 public:
  struct Reading {
    ProgressKind kind;
    const char* what;
    int64_t step;
    uint64_t count;  ///< calls of report() up to this phase's, or more
  };

  void report() { count_.fetch_add(1, std::memory_order_release); }
  void report(ProgressKind kind, const char* what, int64_t step) {
    report();
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

/// Watches all of this rank's signs of progress.
class OwnProgress {
 public:
  OwnProgress(const FlightRecorder& recorder, bool computing_is_progress)
      : recorder_(recorder), computing_is_progress_(computing_is_progress) {}

  /// For one thread at a time; the rest of the class belongs to the thread that calls look().
  ProgressCell& cell() { return cell_; }

  void look(Milliseconds64 longest_gap);
  const ProgressCell::Reading& reading() const { return reading_; }
  /// The time since the last sign.
  Milliseconds64 stalled(const WatchdogLimits& limits) const;
  /// Whether the CPU is busy, but that no longer counts as progress.
  bool computes_in_vain(const WatchdogLimits& limits) const {
    return stalled(limits) > with_computing_.stalled();
  }

 private:
  struct Signs {
    uint64_t progress = 0, calls = 0;
    int64_t waited_ns = 0;
    int64_t storage_mib = 0;
    friend bool operator==(const Signs&, const Signs&) = default;
  };
  bool gave_sign();
  bool is_busy(StallClock::Clock::time_point now);

  const FlightRecorder& recorder_;
  const bool computing_is_progress_;
  ProgressCell cell_;
  ProgressCell::Reading reading_ = cell_.read();
  Signs last_signs_;
  double last_processor_s_ = 0;
  StallClock::Clock::time_point last_look_ = StallClock::Clock::now();
  StallClock with_computing_, without_computing_;
};

/// The state of a rank's training: only a rank that runs is judged. Ended: its watchdog is gone, too.
enum class RunState : uint8_t { NotBegun, Runs, Left, Ended };

/// The state that a rank repeatedly sends to the others.
struct Beat {
  int64_t number = 0;  ///< counts up
  RunState state = RunState::Runs;
  ProgressKind kind = ProgressKind::Idle;
  std::string what = {};  ///< "forward_backward"
  int64_t step = -1;
  int64_t stalled_ms = 0;        ///< time without a sign of progress
  int64_t limit_ms = 0;          ///< for its kind of progress
  std::string setting = {};      ///< the setting of that limit
  int64_t silence_limit_ms = 0;  ///< for the time without a beat, whatever the rank does
  std::string silence_setting = {};
  std::string call = {};  ///< the call in which it waits for peers; "": none
  int pid = 0;
  std::string host = {};
  /// Identifies the kernel and namespace that `pid` belongs to; equal for processes that share a /proc.
  std::string pids = {};
  bool computes = false;  ///< the CPU is busy, but that no longer counts as progress
  bool traced = false;    ///< a debugger is attached
  /// Its last words: a description of this rank, shown if it is lost.
  std::string life;
};

std::string to_text(const Beat& beat);
/// Throws Error.
Beat beat_from(std::string_view text);

/// A rank as seen by another one.
struct RankView {
  int rank = 0;
  std::optional<Beat> beat;  ///< its last one; unset: it hasn't begun
  int64_t silent_ms = 0;     ///< time since that beat arrived
  std::string process;  ///< its state in /proc, if it is on this host: "stopped by a signal", "gone"; else ""
  /// Time since the observer last saw a rank with an excuse (has_excuse). A wait is judged only from then on,
  /// which is later than the end of the excuse by the age of a beat.
  int64_t unexcused_ms = std::numeric_limits<int64_t>::max();
};

struct Verdict {
  std::string text;                ///< one line
  std::vector<int> silent = {};    ///< ranks that no longer respond
  std::vector<int> culprits = {};  ///< the ranks to blame; silent ones may be among them
};

/// Whether others may have to wait for one of these ranks: it loads data, saves, validates, or is being
/// debugged.
bool has_excuse(const std::vector<RankView>& ranks, int64_t interval_ms);

/// Returns nullopt unless the job hangs. `size`: the size of the world, of which `ranks` may be a part.
/// `interval_ms`: the time between beats.
std::optional<Verdict> judge(const std::vector<RankView>& ranks, int size, int64_t interval_ms);

}  // namespace titan::dist

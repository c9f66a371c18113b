#pragma once

// What ranks say about themselves, and the verdict that follows: no threads, no store, no clock.

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "titan/guard/watchdog.h"

namespace titan::dist {

/// How far a rank's training is: only one that runs is judged. Ended: its watchdog is gone, too.
enum class RunState : uint8_t { NotBegun, Runs, Left, Ended };

/// What a rank tells the others, again and again.
struct Beat {
  int64_t number = 0;  ///< counts up
  RunState state = RunState::Runs;
  ProgressKind kind = ProgressKind::Idle;
  std::string what = {};  ///< "forward_backward"
  int64_t step = -1;
  int64_t stalled_ms = 0;        ///< time without a sign of progress
  int64_t limit_ms = 0;          ///< for its kind of progress
  std::string setting = {};      ///< where that comes from
  int64_t silence_limit_ms = 0;  ///< for the time without a beat: these are sent whatever the rank is doing
  std::string silence_setting = {};
  std::string call = {};  ///< the call of its peers that it waits for; "": none
  int pid = 0;
  std::string host = {};
  std::string pids =
      {};  ///< the kernel's numbering of processes that `pid` is from; equal where /proc shows both
  bool computes = false;  ///< its processors work, which no longer counts as progress
  bool traced = false;    ///< by a debugger
  std::string
      life;  ///< who it is, when this was, what it was doing, its last call: in words, for when it is lost
};

std::string to_text(const Beat& beat);
/// Throws Error.
Beat beat_from(std::string_view text);

/// What another rank knows about a rank.
struct RankView {
  int rank = 0;
  std::optional<Beat> beat;  ///< its last; none: it hasn't begun
  int64_t silent_ms = 0;     ///< since that beat arrived
  std::string process;  ///< its state in /proc, if it is on this host: "stopped by a signal", "gone"; else ""
  /// Since the observer last saw a rank that others may have to wait for. A wait counts from there: it
  /// outlasts the excuse by as much as beats are old.
  int64_t unexcused_ms = std::numeric_limits<int64_t>::max();
};

struct Verdict {
  std::string text;                ///< one line
  std::vector<int> silent = {};    ///< ranks that won't do anything any more
  std::vector<int> culprits = {};  ///< silent ones among them
};

/// Whether others may have to wait for one of them: it loads data, saves, validates, or is debugged.
bool has_excuse(const std::vector<RankView>& ranks, int64_t interval_ms);

/// Returns nothing while the job goes on. `size`: of the world, of which `ranks` may be a part;
/// `interval_ms`: between beats.
std::optional<Verdict> judge(const std::vector<RankView>& ranks, int size, int64_t interval_ms);

}  // namespace titan::dist

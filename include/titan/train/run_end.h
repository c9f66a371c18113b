#pragma once

// How a run ends.

#include <cstdint>
#include <string>

#include "titan/core/error.h"

namespace titan::train {

/// Why a run ends before its last step: the same on all ranks.
struct StopCause {
  int signal = 0;  ///< 0: none
  int rank = -1;   ///< lowest rank that was sent one; -1: unknown, as it came before the ranks had met
  bool by_launcher = false;  ///< a rank's signal came from the launcher that its SignalWatch knows
  std::string reason = {};   ///< for the log, before "stops the run": "SIGTERM on rank 1"
};

struct RunEnd {
  int64_t step = 0;     ///< the last one made
  StopCause stop = {};  ///< why it was that one; no reason: all steps are made, or the data ended
};

/// A run finds itself wrong: numbers that aren't finite, spikes without end, replicas that differ. Ranks that
/// are started again would only come to the same end, or continue from a state that nobody should continue
/// from, so launchers don't restart them. All ranks throw it together.
class UnsoundRun : public Error {
 public:
  using Error::Error;
};

/// The exit code of `titan train` after an UnsoundRun.
inline constexpr int kUnsoundRunCode = 3;

}  // namespace titan::train

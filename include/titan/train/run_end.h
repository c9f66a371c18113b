#pragma once

#include "titan/core/error.h"

namespace titan::train {

/// Why a run ends before its last step: the same on all ranks.
struct StopCause {
  int signal = 0;  ///< 0: it doesn't
  int rank = -1;   ///< the lowest that was sent one; -1: not known, it came before the ranks had met
  bool by_launcher = false;  ///< a rank's came from the launcher that its SignalWatch knows
};

// What a run finds wrong with itself, by which a launcher tells it from a lost rank.

/// Numbers that aren't finite, spikes without end, replicas that differ: ranks that are started again would
/// only come to the same, or go on from a state that nobody should go on from. All ranks throw it together.
class UnsoundRun : public Error {
 public:
  using Error::Error;
};

/// The exit code of `titan train` behind one.
inline constexpr int kUnsoundRunCode = 3;

}  // namespace titan::train

#pragma once

namespace titan::train {

/// Why a run ends before its last step: the same on all ranks.
struct StopCause {
  int signal = 0;  ///< 0: it doesn't
  int rank = -1;   ///< the lowest that was sent one; -1: not known, it came before the ranks had met
  bool by_launcher = false;  ///< a rank's came from the launcher that its SignalWatch knows
};

}  // namespace titan::train

#pragma once

// How a run ended, as Trainer::train returns it:
//
//   const titan::train::RunEnd end = trainer.train();
//   if (!end.stop.reason.empty())
//     titan::log::info(titan::str("stopped after step ", end.step, ": ", end.stop.reason));

#include <cstdint>
#include <string>

#include "titan/core/error.h"

namespace titan::train {

/// Why a run ended before its last step. The same on all ranks.
struct StopCause {
  int signal = 0;  ///< 0: none
  int rank = -1;   ///< lowest rank that received a signal; -1: unknown, because the ranks hadn't met yet
  bool by_launcher = false;  ///< the signal came from the launcher
  std::string reason = {};   ///< for the log, before "stops the run": "SIGTERM on rank 1"
};

struct RunEnd {
  int64_t step = 0;     ///< last completed step
  StopCause stop = {};  ///< its reason is empty if all steps were made or the data ended
};

/// The run has found its own state to be wrong: non-finite numbers, endless loss spikes, replicas that
/// differ. Restarted ranks would fail again, or continue from a bad state, so launchers don't restart them.
/// All ranks throw it together.
class UnsoundRun : public Error {
 public:
  using Error::Error;
};

/// The exit code of `titan train` after an UnsoundRun.
inline constexpr int kUnsoundRunCode = 3;

}  // namespace titan::train

#pragma once

// What a run finds wrong with itself, by which a launcher tells it from a lost rank.

#include "titan/core/error.h"

namespace titan::train {

/// Numbers that aren't finite, spikes without end, replicas that differ: ranks that are started again would
/// only come to the same, or go on from a state that nobody should go on from. All ranks throw it together.
class UnsoundRun : public Error {
 public:
  using Error::Error;
};

/// The exit code of `titan train` behind one.
inline constexpr int kUnsoundRunCode = 3;

}  // namespace titan::train

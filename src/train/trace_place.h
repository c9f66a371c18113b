#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "titan/core/error.h"

namespace titan::train {

/// Where in a run a trace finds something: asked for by the threads of a backward while training sets it.
class TracePlace {
 public:
  explicit TracePlace(int rank) : rank_(rank) {}
  void set_step(int64_t step) { step_ = step; }
  /// "step 7, rank 1"
  std::string where() const { return str("step ", step_.load(), ", rank ", rank_); }

 private:
  int rank_;
  std::atomic<int64_t> step_{0};
};

}  // namespace titan::train

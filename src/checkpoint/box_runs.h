#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/ATen_fwd.h>

#include "titan/tensor/placement.h"

namespace titan::checkpoint::detail {

/// Elements that follow each other in a contiguous source, and their places in a target. Counts of elements.
struct Run {
  int64_t from = 0;
  int64_t to = 0;
  int64_t length = 0;
  int64_t to_stride = 1;
};

/// What two boxes of one tensor have in common, as runs that ascend in the source, as long as they can be.
class BoxRuns {
 public:
  /// `source` lies contiguous, `target` with `target_strides`. All three have the same number of dimensions.
  BoxRuns(const Box& source, const Box& target, at::IntArrayRef target_strides);

  /// The next run; false behind the last.
  bool next(Run& run);

 private:
  struct Dim {
    int64_t length, from_stride, to_stride;
  };
  void add_outer(Dim dim);

  std::vector<Dim> dims_;  // innermost first; dims_[0] is a run
  std::vector<int64_t> index_;
  int64_t from_ = 0, to_ = 0;
  bool done_ = false;
};

}  // namespace titan::checkpoint::detail

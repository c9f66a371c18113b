#pragma once

// Numbers of a step on their way from the device to the host.

#include <ATen/core/Tensor.h>

#include "titan/dist/stream.h"
#include "titan/train/trainer.h"

namespace titan::train {

class LateValues {
 public:
  /// `loss`, `flag` (of the loss, over all ranks): double scalars on the device. Queues their copy.
  LateValues(int64_t step, const at::Tensor& loss, const at::Tensor& flag, optim::LaunchedGradNorm norm);
  /// Waits for the copy. Leaves loss_rank unset.
  StepValues read();
  /// After read().
  double loss_flag() const;

 private:
  int64_t step_;
  optim::LaunchedGradNorm norm_;
  at::Tensor host_;  // [loss, flag, squares of ranks...], pinned where there is a GPU
  dist::Event copied_;
};

}  // namespace titan::train

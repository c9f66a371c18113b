#pragma once

// A step's loss and gradient norm on their way to the host. Read at once, the host waits for the device in
// every step. Read late, it doesn't: the device itself skips the update of a step that isn't finite, and the
// host reads the numbers when the next step's work is queued.

#include <cstdint>
#include <memory>

#include "titan/train/trainer.h"

namespace titan::train {

class StepNumbers {
 public:
  virtual ~StepNumbers() = default;
  /// Clips the gradients by their norm over all ranks, and exchanges whether the losses are finite. `loss`:
  /// of this rank, a double scalar on the device. Collective over the world.
  virtual void clip(int64_t step, const at::Tensor& loss) = 0;
  /// Steps the optimizer, unless the numbers of the step that was clipped last aren't finite.
  virtual void update_weights() = 0;
  /// Waits for the device. At once: the numbers of the step that was clipped last; late: of the last that was
  /// updated.
  virtual StepValues read() = 0;
  virtual bool are_late() const = 0;
};

/// `parts` outlive the result.
std::unique_ptr<StepNumbers> make_step_numbers(TrainerParts& parts, double max_norm, bool late);

/// For a step without labels.
StepValues no_values(int64_t step);

}  // namespace titan::train

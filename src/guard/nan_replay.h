#pragma once

// A step whose numbers aren't finite, run again to find where they come from: once gradients are summed over
// ranks, nothing tells whose they were.

#include <string>

#include "titan/train/policy.h"

namespace titan::train {

/// Runs the step's forwards and backwards again, with the same weights and batches, and looks at each
/// module's numbers. Explains the step with the same text on every rank: the module and the rank that made
/// the first number that isn't finite (all ranks that sum parts of it, if there are such); the parameter
/// whose gradient it is in, if no module made one; that only the loss isn't finite; or that all numbers are
/// finite this time. Collective over the world.
class NanReplay final : public TrainerPolicy {
 public:
  std::string explain(Trainer& trainer, const NonFiniteStep& step) override;

 private:
  std::string replay(Trainer& trainer, const NonFiniteStep& step);
};

}  // namespace titan::train

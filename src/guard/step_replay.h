#pragma once

// A step whose numbers aren't finite, run again to learn where they come from: the sum of gradients over
// ranks no longer tells whose they are.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/dist/world.h"
#include "titan/parallel/parameters.h"
#include "titan/train/parallel_dims.h"
#include "titan/train/step_runner.h"

namespace titan::train {

/// Calls `run_again`, which does the forwards and backwards of `step` with the same weights and batches and
/// returns this rank's loss, and looks at each module's numbers meanwhile. Collective over the world, unless
/// run_again throws. Returns the same text on every rank: the module and the rank that made the first number
/// that isn't finite (where ranks add up parts of one, all of them); where no module did, the parameter whose
/// gradient it is in; that it is the loss alone; or that all are finite this time.
std::string replay_step(const dist::World& world, const Meshes& meshes, const std::vector<Stage>& stages,
                        const std::vector<Parameter>& parameters, int64_t step,
                        const std::function<at::Tensor()>& run_again);

}  // namespace titan::train

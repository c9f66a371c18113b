#pragma once

// A step whose numbers aren't finite, run again to learn where they come from: the sum of gradients over
// ranks no longer tells whose they are.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "titan/dist/world.h"
#include "titan/nn/any_ref.h"
#include "titan/parallel/parameters.h"

namespace titan::train {

/// Calls `run_again`, which does the forwards and backwards of `step` with the same weights and batches, and
/// looks at each module's numbers meanwhile. Collective over the world. Returns the same text on every rank:
/// the module and the rank that made the first number that isn't finite; where no module did, the parameter
/// whose gradient it is in; or that all are finite this time.
std::string replay_step(const dist::World& world, const std::vector<nn::AnyRef>& models,
                        const std::vector<Parameter>& parameters, int64_t step,
                        const std::function<void()>& run_again);

}  // namespace titan::train

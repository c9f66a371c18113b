#pragma once

// The ranks that run a distributed test. `titan launch` starts the test program on each; every rank runs
// every test, in one order.

#include "titan/dist/world.h"

namespace titan::testing {

/// Made by main(), ended by it.
const dist::World& world();

}  // namespace titan::testing

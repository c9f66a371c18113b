#pragma once

#include <vector>

#include "titan/config/print.h"

namespace titan::train {

/// Every key of TorchTitan 0.2.2's JobConfig with its default there: what docs/torchtitan_keys.md goes
/// through.
const std::vector<config::ForeignKey>& torchtitan_keys();

}  // namespace titan::train

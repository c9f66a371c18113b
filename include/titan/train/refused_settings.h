#pragma once

// Tables of TorchTitan whose feature doesn't exist here (yet). Their keys are known, so that a TorchTitan
// config is read, and the key that would turn the feature on is refused: a setting that can't be honoured is
// an error, never a warning.

#include "titan/config/table.h"

namespace titan::train {

/// [compile]
struct CompileSettings {};
/// [memory_estimation]
struct MemoryEstimationSettings {};

void describe(config::Table<CompileSettings>& table);
void describe(config::Table<MemoryEstimationSettings>& table);

}  // namespace titan::train

#pragma once

// Tables of TorchTitan whose feature doesn't exist here (yet). Their keys are known, so that a TorchTitan
// config is read, and the key that would turn the feature on is refused: a setting that can't be honoured is
// an error, never a warning.

#include "titan/config/table.h"

namespace titan::train {

/// [profiling]
struct ProfilingSettings {};
/// [compile]
struct CompileSettings {};
/// [quantize]
struct QuantizeSettings {};
/// [memory_estimation]
struct MemoryEstimationSettings {};
/// [fault_tolerance]
struct FaultToleranceSettings {};

void describe(config::Table<ProfilingSettings>& table);
void describe(config::Table<CompileSettings>& table);
void describe(config::Table<QuantizeSettings>& table);
void describe(config::Table<MemoryEstimationSettings>& table);
void describe(config::Table<FaultToleranceSettings>& table);

}  // namespace titan::train

#pragma once

// Devices of configs/devices/: a TOML file with the table [device], whose keys are DeviceSpec's fields.

#include <string>

#include "plan/planned_gpu.h"
#include "titan/config/table.h"

namespace titan::plan {

void describe(config::Table<DeviceSpec>& table);

/// `name`: a file's name without .toml, or a path. Throws ConfigError, which names --device or the file's key.
DeviceSpec load_device(const std::string& name);

}  // namespace titan::plan

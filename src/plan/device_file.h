#pragma once

// Devices of configs/devices/: TOML files with a device, its host and its network; docs/plan.md describes the keys.

#include <string>

#include "plan/cluster.h"

namespace titan::plan {

/// `name`: a file's name without .toml, or a path. Throws ConfigError, which names --device or the file's key.
ClusterSpec load_device(const std::string& name);

/// The text of such a file.
std::string to_toml(const ClusterSpec& cluster);

}  // namespace titan::plan

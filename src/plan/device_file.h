#pragma once

// Devices of configs/devices/: TOML files with a device, its host and its network; docs/plan.md describes the keys.

#include <optional>
#include <string>

#include "plan/cluster.h"

namespace titan::plan {

/// `name`: a file's name without .toml, or a path. Throws ConfigError, which names --device or the file's key.
ClusterSpec load_device(const std::string& name);

/// For load_device(): the known device that a GPU's driver calls by this name ("NVIDIA H200"); nullopt: none.
std::optional<std::string> device_called(const std::string& driver_name);

/// The text of such a file.
std::string to_toml(const ClusterSpec& cluster);

}  // namespace titan::plan

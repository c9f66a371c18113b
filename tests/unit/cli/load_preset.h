#pragma once

// The configs of the repository, as the command line loads them.

#include <string>
#include <vector>

#include "cli/commands.h"
#include "job/job_config.h"

namespace titan::cli {

/// configs/<preset>.toml, checked for `world_size` ranks, without its files. Throws ConfigError.
inline train::JobConfig load_preset(const std::string& preset, int world_size,
                                    std::vector<std::string> overrides = {}) {
  register_builtin_models();
  train::JobConfig config;
  const auto file = std::filesystem::path(TITAN_SOURCE_DIR) / "configs" / (preset + ".toml");
  const config::Origins origins = load(train::job_schema(), {file, std::move(overrides)}, config);
  train::check_job(config, origins, world_size, train::JobFiles::Ignore);
  return config;
}

}  // namespace titan::cli

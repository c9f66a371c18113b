#pragma once

// The configs of the repository, as the command line loads them.

#include <filesystem>
#include <string>
#include <utility>

#include "job/job_config.h"
#include "titan/config/load.h"
#include "titan/models/llama3.h"
#include "titan/train/model_spec.h"
#include "unit/job/words.h"

namespace titan::train {

/// configs/<preset>.toml, checked for `world_size` ranks, without its files. Throws ConfigError.
inline JobConfig load_preset(const std::string& preset, int world_size, Words overrides = {}) {
  if (!model_specs().contains("llama3")) models::register_llama3();
  JobConfig config;
  const auto file = std::filesystem::path(TITAN_SOURCE_DIR) / "configs" / (preset + ".toml");
  const config::Origins origins = config::load(job_schema(), {file, std::move(overrides)}, config);
  check_job(config, origins, world_size, JobFiles::Ignore);
  return config;
}

}  // namespace titan::train

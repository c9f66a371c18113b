#pragma once

// Where a job meets Hugging Face's form of its model.

#include <filesystem>
#include <string>

#include "titan/checkpoint/hugging_face.h"
#include "titan/train/job_config.h"

namespace titan::train {

/// The configured model's form. Throws ConfigError where its family has none.
HfModel configured_hf_model(const JobConfig& config);

/// The folder that checkpoint.initial_load_in_hf reads: initial_load_path, or else model.hf_assets_path.
std::filesystem::path initial_hf_folder(const JobConfig& config);

/// Throws ConfigError with every difference between a folder's config.json and the configured model.
void check_hf_config(const JobConfig& config, const std::filesystem::path& folder);

}  // namespace titan::train

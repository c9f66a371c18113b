#pragma once

// [checkpoint]: for now the model's weights alone: one safetensors file in at the start, one out after the
// last step.

#include <filesystem>
#include <optional>
#include <string>

#include "titan/config/table.h"

namespace titan::train {

/// [checkpoint]
struct CheckpointSettings {
  bool enable = false;
  std::string folder = "checkpoint";             ///< under dump_folder
  int64_t interval = 500;                        ///< has to reach the last step, the only one that is saved
  std::optional<std::string> initial_load_path;  ///< a safetensors file with TorchTitan's parameter names
  std::string export_dtype = "float32";          ///< of the file written after the last step
};

void describe(config::Table<CheckpointSettings>& table);

/// Where the last step's weights go: {dump_folder}/{folder}/step-{step}/model.safetensors.
std::filesystem::path final_model_path(const CheckpointSettings& settings, const std::string& dump_folder,
                                       int64_t step);

}  // namespace titan::train

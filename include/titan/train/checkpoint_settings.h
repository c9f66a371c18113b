#pragma once

// [checkpoint]: the model's weights alone: in at the start, out after the last step, as one
// safetensors file or as a Hugging Face folder.

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
  bool initial_load_in_hf = false;       ///< initial_load_path, or else model.hf_assets_path, is a folder
  bool last_save_in_hf = false;          ///< a Hugging Face folder after the last step, not one file
  std::string export_dtype = "float32";  ///< of what is written after the last step
};

void describe(config::Table<CheckpointSettings>& table);

/// Where the last step's weights go, unless as a folder (then its parent is that):
/// {dump_folder}/{folder}/step-{step}/model.safetensors.
std::filesystem::path final_model_path(const CheckpointSettings& settings, const std::string& dump_folder,
                                       int64_t step);

}  // namespace titan::train

#pragma once

// [checkpoint]: the whole state, saved during training and loaded when a run resumes; the model alone, loaded
// at the start and written after the last step, with TorchTitan's names or as a Hugging Face folder.

#include <optional>
#include <string>
#include <vector>

#include "titan/config/table.h"

namespace titan::checkpoint {
enum class AsyncMode;
}

namespace titan::train {

/// [checkpoint]
struct CheckpointSettings {
  bool enable = false;
  std::string folder = "checkpoint";  ///< under dump_folder
  int64_t interval = 500;             ///< steps from one save to the next
  /// Read if `folder` has no complete step: a safetensors file, a folder with one or several, a step's
  /// folder or, with initial_load_in_hf, a Hugging Face folder.
  std::optional<std::string> initial_load_path;
  bool initial_load_model_only = true;
  /// initial_load_path, or else model.hf_assets_path, is a Hugging Face folder.
  bool initial_load_in_hf = false;
  bool last_save_model_only = true;
  bool last_save_in_hf = false;          ///< write a Hugging Face folder after the last step
  std::string export_dtype = "float32";  ///< dtype of the model alone
  std::string async_mode = "disabled";   ///< "async": copied at once; "async_with_pinned_mem": copied later
  int64_t keep_latest_k = 10;            ///< 0: all
  int64_t load_step = -1;                ///< -1: the newest complete one
  config::StringList exclude_from_loading;  ///< keys of objects
  bool enable_first_step_checkpoint = false;
  bool create_seed_checkpoint = false;
  bool load_only = false;

  std::string on_failure = "stop";  ///< or "continue": a failed save is logged
  std::string when_busy = "wait";   ///< or "skip": skips a save while another is in progress
  int64_t timeout_seconds = 1800;
  bool convert_dtypes = false;

  int64_t peer_interval = 0;             ///< steps between states in the hosts' memory; 0: off
  std::string peer_folder = "/dev/shm";  ///< on each host
};

void describe(config::Table<CheckpointSettings>& table);

checkpoint::AsyncMode async_mode(const CheckpointSettings& settings);

/// Problems of exclude_from_loading whatever can be loaded.
std::vector<std::string> exclusion_problems(const config::StringList& excluded);
/// Problems of exclude_from_loading if only the keys in `known` can be loaded.
std::vector<std::string> unknown_exclusions(const config::StringList& excluded,
                                            const std::vector<std::string>& known);

}  // namespace titan::train

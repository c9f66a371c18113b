#include "titan/train/checkpoint_settings.h"

#include "titan/core/error.h"

namespace titan::train {

namespace {

constexpr const char* kFullState =
    "saving and resuming the full state comes later; the last step writes the model alone";

// Asked for only where checkpoints are enabled.
constexpr const char* kWhere = "enable";

void refuse_full_state(config::Table<CheckpointSettings>& table) {
  table.refused("last_save_model_only", true, kFullState, kWhere);
  table.without_effect("async_mode", std::string("disabled"),
                       "one file is written after the last step, and awaited");
  table.without_effect("keep_latest_k", int64_t{10}, "one file is written");
  table.refused("load_step", int64_t{-1}, kFullState, kWhere);
  table.without_effect("exclude_from_loading", config::StringList{}, "the model alone is loaded");
  table.refused("enable_first_step_checkpoint", false, kFullState, kWhere);
  table.refused("create_seed_checkpoint", false,
                "initial weights don't depend on the layout: debug.seed is enough", kWhere);
  table.refused("load_only", false, kFullState, kWhere);
  table.without_effect("enable_ft_dataloader_checkpoints", true,
                       "read only where fault_tolerance.enable is true");
}

void refuse_hugging_face(config::Table<CheckpointSettings>& table) {
  const char* reason = "Hugging Face folders come later; one safetensors file is read and written";
  table.refused("initial_load_model_only", true, kFullState, kWhere);
  table.refused("initial_load_in_hf", false, reason, kWhere);
  table.refused("initial_load_in_hf_quantized", false, reason, kWhere);
  table.refused("last_save_in_hf", false, reason, kWhere);
}

}  // namespace

void describe(config::Table<CheckpointSettings>& table) {
  table.field("enable", &CheckpointSettings::enable,
              "load initial_load_path at the start, write the model whole after the last step");
  table.field("folder", &CheckpointSettings::folder, "under job.dump_folder");
  table.field("interval", &CheckpointSettings::interval,
              "steps from one checkpoint to the next; for now none may fall before the last step",
              config::at_least(1));
  table.field("initial_load_path", &CheckpointSettings::initial_load_path,
              "safetensors file of model weights with TorchTitan's parameter names");
  table.field("export_dtype", &CheckpointSettings::export_dtype, "of the weights written after the last step",
              config::one_of({"float16", "bfloat16", "float32"}));
  refuse_hugging_face(table);
  refuse_full_state(table);
}

std::filesystem::path final_model_path(const CheckpointSettings& settings, const std::string& dump_folder,
                                       int64_t step) {
  return std::filesystem::path(dump_folder) / settings.folder / str("step-", step) / "model.safetensors";
}

}  // namespace titan::train

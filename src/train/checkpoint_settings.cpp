#include "titan/train/checkpoint_settings.h"

#include "titan/core/error.h"

namespace titan::train {

namespace {

constexpr const char* kFullState =
    "saving and resuming the full state comes later; the last step writes the model alone";

// Asked for only where checkpoints are enabled.
constexpr const char* kWhere = "enable";

// Deleting all but the newest would leave nothing to fall back on while the next is being written.
config::Constraint zero_or_at_least_two() {
  return {"0 (all) or at least 2",
          [](const config::Value& value) {
            const int64_t count = std::get<int64_t>(value);
            return count == 0 || count >= 2;
          },
          {}};
}

void refuse_full_state(config::Table<CheckpointSettings>& table) {
  table.refused("last_save_model_only", true, kFullState, kWhere);
  table.refused("async_mode", std::string("disabled"),
                "the one file is written after the last step, and awaited", kWhere,
                config::one_of({"disabled", "async", "async_with_pinned_mem"}));
  table.refused("keep_latest_k", int64_t{10}, "one file is written, so there is none to delete", kWhere,
                zero_or_at_least_two());
  table.refused("load_step", int64_t{-1}, kFullState, kWhere);
  table.refused("exclude_from_loading", config::StringList{}, "the model is all that is loaded", kWhere);
  table.refused("enable_first_step_checkpoint", false, kFullState, kWhere);
  table.refused("create_seed_checkpoint", false,
                "initial weights don't depend on the layout: debug.seed is enough", kWhere);
  table.refused("load_only", false, kFullState, kWhere);
  table.refused("enable_ft_dataloader_checkpoints", true, "replica groups that come and go come later",
                "fault_tolerance.enable");
}

void describe_hugging_face(config::Table<CheckpointSettings>& table) {
  table.refused("initial_load_model_only", true, kFullState, kWhere);
  table.field("initial_load_in_hf", &CheckpointSettings::initial_load_in_hf,
              "initial_load_path is a Hugging Face folder (config.json, safetensors); unset, "
              "model.hf_assets_path is");
  table.refused("initial_load_in_hf_quantized", false, "quantized weights aren't read", kWhere);
  table.field("last_save_in_hf", &CheckpointSettings::last_save_in_hf,
              "after the last step write a Hugging Face folder, step-N/, in place of one file");
}

}  // namespace

void describe(config::Table<CheckpointSettings>& table) {
  table.field("enable", &CheckpointSettings::enable,
              "load initial_load_path at the start, write the model whole after the last step");
  table.field("folder", &CheckpointSettings::folder, "under job.dump_folder");
  table.field("interval", &CheckpointSettings::interval,
              "steps from one checkpoint to the next; none may fall before the last step, where the model is written",
              config::at_least(1));
  table.field(
      "initial_load_path", &CheckpointSettings::initial_load_path,
      "safetensors file of model weights with TorchTitan's parameter names (or see initial_load_in_hf), from "
      "the working directory if it is relative");
  table.field("export_dtype", &CheckpointSettings::export_dtype, "of the weights written after the last step",
              config::one_of({"float16", "bfloat16", "float32"}));
  describe_hugging_face(table);
  refuse_full_state(table);
}

std::filesystem::path final_model_path(const CheckpointSettings& settings, const std::string& dump_folder,
                                       int64_t step) {
  return std::filesystem::path(dump_folder) / settings.folder / str("step-", step) / "model.safetensors";
}

}  // namespace titan::train

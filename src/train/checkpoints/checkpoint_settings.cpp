#include "train/checkpoints/checkpoint_settings.h"

#include <algorithm>

#include <c10/util/StringUtil.h>

#include "titan/checkpoint/checkpointer.h"
#include "titan/core/error.h"

namespace titan::train {

namespace {

// Longer times overflow when counted in nanoseconds.
config::Constraint up_to_a_week() {
  return {"1 to 604800",
          [](const config::Value& value) {
            const int64_t seconds = std::get<int64_t>(value);
            return seconds >= 1 && seconds <= 604800;
          },
          {}};
}

// Deleting all but the newest would leave nothing to fall back on while the next is being written.
config::Constraint zero_or_at_least_two() {
  return {"0 (all) or at least 2",
          [](const config::Value& value) {
            const int64_t count = std::get<int64_t>(value);
            return count == 0 || count >= 2;
          },
          {}};
}

void describe_saving(config::Table<CheckpointSettings>& table) {
  table.field("interval", &CheckpointSettings::interval, "steps from one saved state to the next",
              config::at_least(1));
  table.field("enable_first_step_checkpoint", &CheckpointSettings::enable_first_step_checkpoint,
              "also save after step 1, so that a setup that can't save fails early");
  table.field("async_mode", &CheckpointSettings::async_mode,
              "what training waits for: disabled, the file; async, a copy in host memory; "
              "async_with_pinned_mem, that copy, but only before the weights change next",
              config::one_of({"disabled", "async", "async_with_pinned_mem"}));
  table.field("keep_latest_k", &CheckpointSettings::keep_latest_k,
              "number of saved states to keep; the newest with finite numbers is always kept",
              zero_or_at_least_two());
  table.field("on_failure", &CheckpointSettings::on_failure,
              "after a failed save: stop the run, or log the failure and continue",
              config::one_of({"stop", "continue"}));
  table.field("when_busy", &CheckpointSettings::when_busy,
              "a save that is due while another is in progress waits for it, or is skipped and logged",
              config::one_of({"wait", "skip"}));
  table.field("timeout_seconds", &CheckpointSettings::timeout_seconds,
              "how long a rank waits for the others, or a save for the previous one", up_to_a_week());
}

// A relative path would mean different folders on different hosts.
config::Constraint absolute_path() {
  return {"an absolute path",
          [](const config::Value& value) { return std::get<std::string>(value).starts_with('/'); },
          {}};
}

void describe_peers(config::Table<CheckpointSettings>& table) {
  table.field("peer_interval", &CheckpointSettings::peer_interval,
              "steps between states that are kept in the hosts' memory, about what a lost rank costs; each "
              "host's files are copied to another host; 0: off",
              config::at_least(0));
  table.field(
      "peer_folder", &CheckpointSettings::peer_folder,
      "where each host keeps these states, in its own memory; the job's folder in it is removed when the job "
      "ends",
      absolute_path());
}

void describe_loading(config::Table<CheckpointSettings>& table) {
  table.field("load_step", &CheckpointSettings::load_step,
              "the step in `folder` that the run resumes from; -1: the newest complete one",
              config::at_least(-1));
  table.field("exclude_from_loading", &CheckpointSettings::exclude_from_loading,
              "parts of a saved state that start afresh instead of being loaded: optimizer, lr_scheduler, "
              "dataloader, train_state, rng, or a key of your own");
  table.field("load_only", &CheckpointSettings::load_only, "load, and save nothing");
  table.field("convert_dtypes", &CheckpointSettings::convert_dtypes,
              "convert tensors that were saved in another dtype instead of refusing them");
  table.field(
      "initial_load_path", &CheckpointSettings::initial_load_path,
      "read if `folder` has no complete step: a safetensors file with TorchTitan's parameter names, a "
      "folder with such a model.safetensors or several files and their index, or a step-N folder (see also "
      "initial_load_in_hf); a relative path starts at the working directory");
  table.field("initial_load_model_only", &CheckpointSettings::initial_load_model_only,
              "load only the model from a step-N folder at initial_load_path, not the whole state");
  table.field("initial_load_in_hf", &CheckpointSettings::initial_load_in_hf,
              "initial_load_path is a Hugging Face folder (config.json, safetensors); if the path is unset, "
              "model.hf_assets_path is that folder");
  table.refused("initial_load_in_hf_quantized", false, "quantized weights aren't read", "enable");
}

void describe_model_alone(config::Table<CheckpointSettings>& table) {
  table.field(
      "last_save_model_only", &CheckpointSettings::last_save_model_only,
      "after the last step write the model alone, as safetensors files in step-N, not the whole state");
  table.field("last_save_in_hf", &CheckpointSettings::last_save_in_hf,
              "after the last step write a Hugging Face folder, step-N/, instead of TorchTitan's names");
  table.field("export_dtype", &CheckpointSettings::export_dtype, "dtype of the model alone",
              config::one_of({"float16", "bfloat16", "float32"}));
  table.field("create_seed_checkpoint", &CheckpointSettings::create_seed_checkpoint,
              "save the initial model as step 0, on one rank, then exit");
  table.refused("enable_ft_dataloader_checkpoints", true,
                "replica groups that join and leave a run aren't supported yet", "fault_tolerance.enable");
}

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

void describe(config::Table<CheckpointSettings>& table) {
  table.field("enable", &CheckpointSettings::enable,
              "save the state every interval steps, and resume from it at the start");
  table.field(
      "folder", &CheckpointSettings::folder,
      "folder of the saved states: a path under job.dump_folder, an absolute path, or SCHEME:/path of a "
      "registered storage");
  describe_saving(table);
  describe_peers(table);
  describe_loading(table);
  describe_model_alone(table);
}

checkpoint::AsyncMode async_mode(const CheckpointSettings& settings) {
  if (settings.async_mode == "async") return checkpoint::AsyncMode::Copied;
  if (settings.async_mode == "async_with_pinned_mem") return checkpoint::AsyncMode::Staged;
  return checkpoint::AsyncMode::Disabled;
}

std::vector<std::string> exclusion_problems(const config::StringList& excluded) {
  std::vector<std::string> problems;
  if (contains(excluded, "model"))
    problems.push_back("the model can't be excluded: it is what a checkpoint is for");
  // Fresh moments would meet the full learning rate at once if the schedule continued.
  if (contains(excluded, "optimizer") && !contains(excluded, "lr_scheduler"))
    problems.push_back(
        "without the optimizer's state the schedule must start afresh too: exclude lr_scheduler as well");
  return problems;
}

std::vector<std::string> unknown_exclusions(const config::StringList& excluded,
                                            const std::vector<std::string>& known) {
  std::vector<std::string> problems;
  for (const std::string& key : excluded) {
    if (contains(known, key)) continue;
    problems.push_back(
        str("'", key, "' isn't saved; known: ", c10::Join(", ", known), did_you_mean(key, known)));
  }
  return problems;
}

}  // namespace titan::train

#include "train/hf_job.h"

#include "titan/checkpoint/hf_folder.h"
#include "titan/core/error.h"
#include "titan/train/hf_form.h"

namespace titan::train {

HfModel configured_hf_model(const JobConfig& config) {
  auto model = config.spec().hugging_face(config.args());
  if (!model)
    throw ConfigError(str("model.name = ", config.model.name, ": the family has no form in transformers"));
  return *std::move(model);
}

std::filesystem::path initial_hf_folder(const JobConfig& config) {
  return config.checkpoint.initial_load_path.value_or(config.model.hf_assets_path);
}

void check_hf_config(const JobConfig& config, const std::filesystem::path& folder) {
  const HfModel configured = configured_hf_model(config);
  auto problems = config_differences(hf_model_of_folder(config.spec(), folder), configured, folder);
  if (!problems.empty()) throw ConfigError(std::move(problems));
}

}  // namespace titan::train

#include "titan/train/hf_form.h"

#include "titan/checkpoint/hf_folder.h"
#include "titan/core/error.h"

namespace titan::train {

HfModel hf_model_of_folder(const ModelSpec& spec, const std::filesystem::path& folder) {
  const HfConfig config = read_hf_config(folder);
  try {
    const auto args = spec.args_of_hugging_face(config);
    return spec.hugging_face(args.get()).value();
  } catch (const ConfigError& error) {
    std::vector<std::string> problems;
    for (const std::string& problem : error.problems())
      problems.push_back(str((folder / "config.json").string(), ": ", problem));
    throw ConfigError(std::move(problems));
  }
}

}  // namespace titan::train

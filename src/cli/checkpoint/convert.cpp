// titan checkpoint convert: between a Hugging Face folder and our one file, without a job.

#include <cstdio>

#include "cli/checkpoint/arguments.h"
#include "cli/checkpoint/commands.h"
#include "cli/progress.h"
#include "titan/checkpoint/hf_model.h"
#include "titan/config/load.h"
#include "titan/core/error.h"
#include "titan/train/hf_form.h"
#include "titan/train/job_config.h"

namespace titan::cli {

namespace {

namespace fs = std::filesystem;

train::JobConfig load_config(const fs::path& path) {
  train::JobConfig config;
  config::load(train::job_schema(), {path, {}}, config);
  return config;
}

HfModel configured_model(const train::JobConfig& config) {
  std::vector<std::string> problems;
  config.spec().check(config.args(), problems);
  if (!problems.empty()) throw ConfigError(std::move(problems));
  auto model = config.spec().hugging_face(config.args());
  if (!model)
    throw ConfigError(
        str("titan checkpoint convert: model.name = ", config.model.name, " has no form in transformers"));
  return *std::move(model);
}

ConvertOptions options_of(const ConvertArguments& arguments, Progress& progress) {
  ConvertOptions options;
  if (!arguments.dtype.empty()) options.dtype = train::scalar_type(arguments.dtype);
  options.folder.shard_bytes = static_cast<int64_t>(arguments.shard_gb * 1e9);
  options.progress = [&progress](int64_t bytes, int64_t total) { progress.show(bytes, total); };
  return options;
}

void from_hugging_face(const ConvertArguments& arguments, const ConvertOptions& options) {
  train::JobConfig config;
  const bool configured = !arguments.config.empty();
  if (configured) config = load_config(arguments.config);
  const HfModel model = train::hf_model_of_folder(config.spec(), arguments.from);
  if (configured) {
    auto problems = config_differences(model, configured_model(config), arguments.from);
    if (!problems.empty()) throw ConfigError(std::move(problems));
  }
  convert_from_hf(arguments.from, arguments.to, model, options);
}

void to_hugging_face(const ConvertArguments& arguments, ConvertOptions options) {
  if (arguments.config.empty())
    throw ConfigError(str("titan checkpoint convert: ", arguments.from.string(),
                          " doesn't say how many heads its model has; add --config, the run's config.toml"));
  const train::JobConfig config = load_config(arguments.config);
  options.folder.assets = config.model.hf_assets_path;
  convert_to_hf(arguments.from, arguments.to, configured_model(config), options);
}

void convert(const ConvertArguments& arguments) {
  if (!fs::exists(arguments.from))
    throw ConfigError(str("titan checkpoint convert: there is nothing at ", arguments.from.string()));
  if (fs::exists(fs::symlink_status(arguments.to)))
    throw ConfigError(str("titan checkpoint convert: ", arguments.to.string(),
                          " is there already; remove it or take another name"));
  Progress progress;
  const ConvertOptions options = options_of(arguments, progress);
  fs::is_directory(arguments.from) ? from_hugging_face(arguments, options)
                                   : to_hugging_face(arguments, options);
}

}  // namespace

int checkpoint_convert(const Arguments& words) {
  const ConvertArguments arguments = parse_convert_arguments(words);
  if (!arguments.help.empty()) return std::fputs(arguments.help.c_str(), stdout), 0;
  convert(arguments);
  std::printf("%s\n", arguments.to.c_str());
  return 0;
}

}  // namespace titan::cli

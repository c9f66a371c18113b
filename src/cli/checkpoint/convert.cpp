// titan checkpoint convert: from a saved state, a Hugging Face folder or our one file to one of the latter
// two, without a job.

#include <cstdio>

#include "cli/checkpoint/commands.h"
#include "cli/text.h"
#include "config/differences.h"
#include "job/job_config.h"
#include "titan/checkpoint/hugging_face.h"
#include "titan/checkpoint/saved_state.h"
#include "titan/config/load.h"
#include "titan/core/error.h"
#include "titan/train/model_spec.h"
#include "train/checkpoints/run_checkpoints.h"

namespace titan::cli {

namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse_to_convert(const std::string& problem) {
  throw ConfigError(str("titan checkpoint convert: ", problem));
}

train::JobConfig load_config(const config::Sources& sources) {
  train::JobConfig config;
  config::load(train::job_schema(), sources, config);
  return config;
}

// What tells a run's model, and of that nothing else: the rest may be of another version. Empty: nothing
// does.
std::string model_settings(const checkpoint::Manifest& manifest) {
  std::string toml;
  bool is_named = false;
  for (const auto& [key, value] : config::printed_settings(manifest.config)) {
    is_named = is_named || key == "model.name";
    if (key.starts_with("model.")) toml += str(key, " = ", value, "\n");
  }
  return is_named ? toml : "";
}

train::JobConfig config_of(const checkpoint::SavedState& state, const fs::path& given) {
  if (!given.empty()) return load_config({given, {}});
  const fs::path manifest = state.folder() / checkpoint::kManifestName;
  const std::string settings = model_settings(state.manifest());
  if (settings.empty())
    refuse_to_convert(str(manifest.string(), " doesn't tell which model it is; add --config"));
  return load_config({.file = str(manifest.string(), ", config"), .overrides = {}, .toml = settings});
}

HfModel configured_model(const train::JobConfig& config) {
  std::vector<std::string> problems;
  config.spec().check(config.args(), problems);
  if (!problems.empty()) throw ConfigError(std::move(problems));
  auto model = config.spec().hugging_face(config.args());
  if (!model) refuse_to_convert(str("model.name = ", config.model.name, " has no form in transformers"));
  return *std::move(model);
}

ConvertOptions options_of(const ConvertArguments& arguments, Progress& progress) {
  ConvertOptions options;
  if (!arguments.dtype.empty()) options.dtype = train::scalar_type(arguments.dtype);
  options.folder.shard_bytes = static_cast<int64_t>(arguments.shard_gb * 1e9);
  options.progress = [&progress](int64_t bytes, int64_t total) { progress.show(bytes, total); };
  return options;
}

bool is_named_as_file(const fs::path& path) { return path.extension() == ".safetensors"; }

void from_hugging_face(const ConvertArguments& arguments, const ConvertOptions& options) {
  train::JobConfig config;
  const bool configured = !arguments.config.empty();
  if (configured) config = load_config({arguments.config, {}});
  const HfModel model = train::hf_model_of_folder(config.spec(), arguments.from);
  if (configured) {
    auto problems = config_differences(model, configured_model(config), arguments.from);
    if (!problems.empty()) throw ConfigError(std::move(problems));
  }
  convert_from_hf(arguments.from, arguments.to, model, options);
}

void from_file(const fs::path& file, const ConvertArguments& arguments, ConvertOptions options) {
  if (is_named_as_file(arguments.to))
    refuse_to_convert(str(file.string(),
                          " is one file already; a Hugging Face folder, which it can become, "
                          "has a name without .safetensors"));
  if (arguments.config.empty())
    refuse_to_convert(
        str(file.string(), " doesn't say how many heads its model has; add --config, the run's config.toml"));
  const train::JobConfig config = load_config({arguments.config, {}});
  options.folder.assets = config.model.hf_assets_path;
  convert_to_hf(file, arguments.to, configured_model(config), options);
}

void from_state(const ConvertArguments& arguments, ConvertOptions options) {
  const checkpoint::SavedState state(arguments.from);
  if (is_named_as_file(arguments.to)) return convert_state(state, arguments.to, options);
  const train::JobConfig config = config_of(state, arguments.config);
  options.folder.assets = config.model.hf_assets_path;
  convert_state_to_hf(state, arguments.to, configured_model(config), options);
}

void convert_folder(const ConvertArguments& arguments, const ConvertOptions& options) {
  const auto has = [&](const char* name) { return fs::exists(arguments.from / name); };
  if (has(checkpoint::kManifestName)) return from_state(arguments, options);
  if (has("config.json") || has("model.safetensors.index.json")) return from_hugging_face(arguments, options);
  // As a run leaves it behind its last step.
  if (has(train::kModelFile)) return from_file(arguments.from / train::kModelFile, arguments, options);
  step_folder(arguments.from, "convert");  // says which one may have been meant
  refuse_to_convert(str(arguments.from.string(),
                        " holds no manifest.json (a saved state), no config.json (Hugging Face) and no ",
                        train::kModelFile));
}

void convert(const ConvertArguments& arguments) {
  if (!fs::exists(arguments.from)) refuse_to_convert(str("there is nothing at ", arguments.from.string()));
  if (fs::exists(fs::symlink_status(arguments.to)))
    refuse_to_convert(str(arguments.to.string(), " is there already; remove it or take another name"));
  Progress progress;
  const ConvertOptions options = options_of(arguments, progress);
  fs::is_directory(arguments.from) ? convert_folder(arguments, options)
                                   : from_file(arguments.from, arguments, options);
}

}  // namespace

int checkpoint_convert(const Arguments& words) {
  const ConvertArguments arguments = parse_convert_arguments(words);
  if (!arguments.help.empty()) return print(arguments.help);
  convert(arguments);
  std::printf("%s\n", arguments.to.c_str());
  return 0;
}

}  // namespace titan::cli

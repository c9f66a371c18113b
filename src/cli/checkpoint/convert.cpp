// titan checkpoint convert: turns a saved state, a Hugging Face folder or our safetensors file into one of
// the latter two, without a job.

#include "checkpoint/format/stored_files.h"
#include "checkpoint/hugging_face/model_folder.h"
#include "cli/checkpoint/commands.h"
#include "cli/parser.h"
#include "cli/text.h"
#include "job/build.h"
#include "job/job_config.h"
#include "titan/checkpoint/hugging_face.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/config/load.h"
#include "titan/core/error.h"
#include "titan/train/model_spec.h"
#include "train/checkpoints/run_checkpoints.h"

namespace titan::cli {

namespace {

namespace fs = std::filesystem;

constexpr const char* kConvertNotes =
    R"(FROM is one of:
  the folder of a run's step, or of the run (then its newest step): if TO ends in .safetensors, its model
    becomes that file, for checkpoint.initial_load_path; otherwise TO becomes a Hugging Face folder
    (config.json, and model.safetensors or shards with an index);
  a Hugging Face folder: TO, which ends in .safetensors, becomes a file;
  such a file: TO becomes a Hugging Face folder;
  the folder of a step that holds only the model: TO becomes one file or a Hugging Face folder.
A Hugging Face folder also gets the tokenizer's files from the config's model.hf_assets_path. Every block that
is read is compared with its checksum, if it has one (titan's own files do). Whatever the model's size, 16 MiB
are read and written at a time. TO must not exist yet: the same command a second time is refused. TO appears
when it is complete.
)";

[[noreturn]] void refuse_to_convert(const std::string& problem) {
  throw ConfigError(str("titan checkpoint convert: ", problem));
}

train::JobConfig load_config(const config::Sources& sources) {
  train::JobConfig config;
  config::load(train::job_schema(), sources, config);
  return config;
}

// The settings of a run's model, as TOML; "" if the config doesn't name a model. Leaves out the other
// settings, which may be from another version.
std::string model_settings(const checkpoint::Manifest& manifest) {
  std::string toml;
  bool is_named = false;
  for (const auto& [key, value] : config::printed_settings(manifest.config)) {
    is_named = is_named || key == "model.name";
    if (key.starts_with("model.")) toml += str(key, " = ", value, "\n");
  }
  return is_named ? toml : "";
}

train::JobConfig config_of(const checkpoint::Manifest& manifest, const fs::path& path,
                           const fs::path& given) {
  if (!given.empty()) return load_config({given, {}});
  const std::string settings = model_settings(manifest);
  if (settings.empty()) refuse_to_convert(str(path.string(), " doesn't say which model it is; add --config"));
  return load_config({.file = str(path.string(), ", config"), .overrides = {}, .toml = settings});
}

HfModel configured_model(const train::JobConfig& config) {
  std::vector<std::string> problems;
  config.spec().check(config.args(), problems);
  if (!problems.empty()) throw ConfigError(std::move(problems));
  auto model = config.spec().hugging_face(config.args());
  if (!model) refuse_to_convert(str("model.name = ", config.model.name, " has no form in transformers"));
  return *std::move(model);
}

ConvertOptions options_of(const ConvertArguments& arguments, ProgressLine& progress) {
  ConvertOptions options;
  if (!arguments.dtype.empty()) options.dtype = train::scalar_type(arguments.dtype);
  options.folder.shard_bytes = static_cast<int64_t>(arguments.shard_gb * 1e9);
  options.progress = [&progress](int64_t bytes, int64_t total) { progress.show(bytes, total); };
  return options;
}

bool is_named_as_file(const fs::path& path) { return path.extension() == ".safetensors"; }

void from_hugging_face(const ConvertArguments& arguments, const ConvertOptions& options) {
  if (!is_named_as_file(arguments.to))
    refuse_to_convert(
        str(arguments.from.string(),
            " is a Hugging Face folder already; give TO a name that ends in .safetensors to make one file"));
  if (arguments.config.empty()) {
    const train::NamedModel model = train::model_of_folder(arguments.from);
    const auto form = train::model_specs().get(model.name)->hugging_face(model.args.get());
    return convert_from_hf(arguments.from, arguments.to, *form, options);
  }
  const train::JobConfig config = load_config({arguments.config, {}});
  const HfModel model = configured_model(config);
  train::check_hf_config(config, arguments.from);
  convert_from_hf(arguments.from, arguments.to, model, options);
}

// The tokenizer's files, and the rest of config.json.
void add_sources(HfWriteOptions& options, const train::JobConfig& config) {
  const HfWriteOptions sources = train::hf_write_options(config);
  options.assets = sources.assets;
  options.config_source = sources.config_source;
}

// Writes the files of a folder with our names as one.
void join_files(const fs::path& folder, const fs::path& to, const ConvertOptions& options) {
  const HfFolder files(folder);
  HfModel same_names;
  for (const std::string& name : files.names())
    same_names.tensors.push_back(
        {.name = name, .hf_name = name, .shape = files.file_of(name).info(name).shape});
  convert_from_hf(folder, to, same_names, options);
}

// `file`: one file, or a folder of files, with our names.
void from_file(const fs::path& file, const ConvertArguments& arguments, ConvertOptions options) {
  if (fs::is_directory(file) && titan::detail::has_hf_names(file))
    refuse_to_convert(str(file.string(),
                          " has Hugging Face's names but no config.json, which says what the model is; put "
                          "its config.json there"));
  if (is_named_as_file(arguments.to) && fs::is_directory(file))
    return join_files(file, arguments.to, options);
  if (is_named_as_file(arguments.to))
    refuse_to_convert(str(file.string(),
                          " is one file already. It can become a Hugging Face folder: give TO a name without "
                          ".safetensors"));
  const bool has_manifest = fs::exists(file / checkpoint::kModelManifestName);
  if (arguments.config.empty() && !has_manifest)
    refuse_to_convert(
        str(file.string(), " doesn't say how many heads its model has; add --config, the run's config.toml"));
  const train::JobConfig config = has_manifest
                                      ? config_of(checkpoint::read_model_manifest(file),
                                                  file / checkpoint::kModelManifestName, arguments.config)
                                      : load_config({arguments.config, {}});
  add_sources(options.folder, config);
  convert_to_hf(file, arguments.to, configured_model(config), options);
}

void from_state(const ConvertArguments& arguments, ConvertOptions options) {
  const checkpoint::SavedState state(arguments.from);
  if (is_named_as_file(arguments.to)) return convert_state(state, arguments.to, options);
  const train::JobConfig config =
      config_of(state.manifest(), arguments.from / checkpoint::kManifestName, arguments.config);
  add_sources(options.folder, config);
  convert_state_to_hf(state, arguments.to, configured_model(config), options);
}

void convert_folder(const ConvertArguments& arguments, const ConvertOptions& options) {
  const auto has = [&](const char* name) { return fs::exists(arguments.from / name); };
  if (has(checkpoint::kManifestName)) return from_state(arguments, options);
  // A run's folder may have a config.json too, with its settings.
  const bool has_weights = has("model.safetensors") || has(checkpoint::detail::kModelIndex);
  if (has_weights && has("config.json")) return from_hugging_face(arguments, options);
  // A run leaves such a folder after its last step.
  if (has_weights) return from_file(arguments.from, arguments, options);
  ConvertArguments of_step = arguments;
  of_step.from = step_or_newest(arguments.from, "convert", NewestStep::OfAnyKind);
  if (of_step.from != arguments.from) return convert_folder(of_step, options);
  refuse_to_convert(str(arguments.from.string(),
                        " holds no manifest.json (a saved state), and neither model.safetensors nor ",
                        checkpoint::detail::kModelIndex, " (a model)"));
}

void convert(const ConvertArguments& arguments) {
  if (!fs::exists(arguments.from)) refuse_to_convert(str("there is nothing at ", arguments.from.string()));
  if (fs::exists(fs::symlink_status(arguments.to)))
    refuse_to_convert(str(arguments.to.string(), " exists already; remove it or choose another name"));
  ProgressLine progress;
  const ConvertOptions options = options_of(arguments, progress);
  fs::is_directory(arguments.from) ? convert_folder(arguments, options)
                                   : from_file(arguments.from, arguments, options);
}

}  // namespace

ConvertArguments parse_convert_arguments(const Arguments& words) {
  ConvertArguments arguments;
  Parser parser("titan checkpoint convert", "FROM TO [--config FILE] [--dtype DTYPE] [--shard-gb SIZE]",
                kConvertNotes);
  parser.path("FROM", arguments.from,
              "a step's or a run's folder, a Hugging Face folder, or a safetensors file that titan wrote");
  parser.path("TO", arguments.to, "a file NAME.safetensors, or a Hugging Face folder");
  parser.file(
      "--config", arguments.config,
      "a run's config with its [model]; needed to write a Hugging Face folder from a file (a step has its "
      "own config); a Hugging Face folder that is read must match it");
  parser
      .value("--dtype", arguments.dtype, "DTYPE",
             "float32, bfloat16 or float16 (default: each tensor keeps its own)")
      ->check(CLI::IsMember({"float32", "bfloat16", "float16"}).description(""));
  parser.number("--shard-gb", arguments.shard_gb, CLI::Range(1e-6, 1e6),
                "largest file of a folder, in 10^9 bytes (default 5)", "SIZE");
  parser.parse(words);
  return arguments;
}

int checkpoint_convert(const Arguments& words) {
  const ConvertArguments arguments = parse_convert_arguments(words);
  convert(arguments);
  return print(arguments.to.string() + "\n");
}

}  // namespace titan::cli

// Checkpoints of a job, from its settings.

#include <algorithm>
#include <limits>
#include <set>

#include <c10/util/StringUtil.h>

#include "checkpoint/format/stored_files.h"
#include "data/feed/feeds.h"
#include "job/build.h"
#include "titan/checkpoint/hugging_face.h"
#include "titan/checkpoint/manifest.h"
#include "titan/checkpoint/safetensors.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/checkpoint/storage.h"
#include "titan/config/load.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/data/loader.h"
#include "titan/optim/optimizer.h"
#include "titan/train/model_spec.h"

namespace titan::train {

namespace {

namespace fs = std::filesystem;

// Throws ConfigError if the model's family has no form in transformers.
HfModel configured_hf_model(const JobConfig& config) {
  auto model = config.spec().hugging_face(config.args());
  if (!model)
    throw ConfigError(str("model.name = ", config.model.name, ": the family has no form in transformers"));
  return *std::move(model);
}

std::function<void()> load_hf(const JobConfig& config, const fs::path& folder,
                              const std::vector<Parameter>& parameters) {
  return [config, folder, parameters] {
    check_hf_config(config, folder);
    load_hf_model(parameters, configured_hf_model(config), folder);
    log::info_rank0(str("initial weights come from ", folder.string(), ", in Hugging Face's format"));
  };
}

std::function<void()> load_file(const fs::path& file, const std::vector<Parameter>& parameters,
                                const DeviceMesh& pipeline) {
  return [file, parameters, pipeline] {
    load_model(parameters, file, pipeline);
    log::info_rank0(str("initial weights come from ", file.string()));
  };
}

InitialState initial_state(const JobConfig& config, const Meshes& meshes,
                           const std::vector<Parameter>& parameters) {
  const InitialSource source = initial_source(config);
  InitialState initial;
  initial.model_only = config.checkpoint.initial_load_model_only;
  if (source.kind == InitialKind::None) return initial;
  initial.setting =
      config.checkpoint.initial_load_path ? "checkpoint.initial_load_path" : "checkpoint.initial_load_in_hf";
  if (source.kind == InitialKind::Step) initial.step_folder = source.path;
  if (source.kind == InitialKind::HuggingFace) initial.load_model = load_hf(config, source.path, parameters);
  if (source.kind == InitialKind::ModelFile || source.kind == InitialKind::Nothing)
    initial.load_model = load_file(source.path, parameters, meshes.pp);
  return initial;
}

// Whether the run's last step in the folder shows that the run is complete.
bool leaves_its_end(const CheckpointSettings& settings) {
  return settings.enable && !settings.load_only && !settings.create_seed_checkpoint && settings.load_step < 0;
}

std::optional<ModelExport> model_export(const JobConfig& config) {
  const CheckpointSettings& settings = config.checkpoint;
  if (!settings.last_save_model_only) return std::nullopt;
  ModelExport how;
  how.dtype = scalar_type(settings.export_dtype);
  if (settings.last_save_in_hf) {
    how.hf = configured_hf_model(config);
    how.hf_options = hf_write_options(config);
  }
  return how;
}

}  // namespace

std::optional<PeerSettings> peer_settings(const CheckpointSettings& settings, const dist::Launch& launch) {
  if (settings.peer_interval == 0 || settings.create_seed_checkpoint) return std::nullopt;
  const dist::JobIdentity job = dist::read_job_identity(launch, dist::process_environment());
  if (job.id.empty())
    throw ConfigError(str("checkpoint.peer_interval = ", settings.peer_interval,
                          " keeps states for restarted ranks, but ", job.problem));
  return PeerSettings{.interval = settings.peer_interval, .folder = settings.peer_folder, .job = job.id};
}

fs::path steps_folder(const JobConfig& config) {
  return checkpoint::joined(config.job.dump_folder, config.checkpoint.folder);
}

void check_hf_config(const JobConfig& config, const std::filesystem::path& folder) {
  configured_hf_model(config);
  auto problems = folder_differences(config.spec(), config.args(), folder);
  if (!problems.empty()) throw ConfigError(std::move(problems));
}

HfWriteOptions hf_write_options(const JobConfig& config) {
  const InitialSource source = initial_source(config);
  HfWriteOptions options;
  options.assets = config.model.hf_assets_path;
  if (options.assets.filename() == "tokenizer.json") options.assets = options.assets.parent_path();
  options.config_source = source.kind == InitialKind::HuggingFace ? source.path : options.assets;
  return options;
}

InitialSource initial_source(const JobConfig& config) {
  const CheckpointSettings& settings = config.checkpoint;
  if (settings.initial_load_in_hf)
    return {InitialKind::HuggingFace, settings.initial_load_path.value_or(config.model.hf_assets_path)};
  if (!settings.initial_load_path) return {};
  const fs::path path = *settings.initial_load_path;
  std::error_code ignored;
  if (fs::is_regular_file(path, ignored)) return {InitialKind::ModelFile, path};
  if (fs::exists(path / checkpoint::kManifestName, ignored)) return {InitialKind::Step, path};
  for (const char* name :
       {checkpoint::kModelManifestName, "model.safetensors", checkpoint::detail::kModelIndex})
    if (fs::is_regular_file(path / name, ignored)) return {InitialKind::ModelFile, path};
  return {InitialKind::Nothing, path};
}

std::optional<int64_t> end_of_run(const JobConfig& config) {
  if (!leaves_its_end(config.checkpoint)) return std::nullopt;
  try {
    const auto last = last_step_in(steps_folder(config));
    return last && *last >= config.training.steps ? last : std::nullopt;
  } catch (const Error& error) {
    log::debug(error.what());  // loading reports the problem
    return std::nullopt;
  }
}

bool run_has_ended(const JobConfig& config, const dist::World& world) {
  if (!leaves_its_end(config.checkpoint)) return false;
  const StepChoice last = choose_on_rank_0(world, [&] { return StepChoice{.step = end_of_run(config)}; });
  if (last.step)
    log::info_rank0(
        str("this run is complete: ", checkpoint::step_path(steps_folder(config), *last.step).string(),
            " exists, and training.steps = ", config.training.steps,
            "; to continue, raise training.steps, set checkpoint.load_step to an earlier step, or use "
            "another job.dump_folder"));
  return last.step.has_value();
}

namespace {

// A damaged step and another model's folder are left out: check_job reports those.
std::vector<std::string> misfits_of_source(const JobConfig& config, const InitialSource& source,
                                           const std::vector<Parameter>& parameters) {
  switch (source.kind) {
    case InitialKind::HuggingFace:
      if (!folder_differences(config.spec(), config.args(), source.path).empty()) return {};
      return tensor_differences(HfFolder(source.path), configured_hf_model(config));
    case InitialKind::ModelFile:
      return model_file_differences(parameters, source.path);
    case InitialKind::Step:
      if (!checkpoint::quick_problems(source.path).empty()) return {};
      return model_misfits(source.path, parameters, config::print_toml(job_schema(), config),
                           config.checkpoint.convert_dtypes);
    default:
      return {};
  }
}

bool is_excluded(const JobConfig& config, const std::string& key) {
  return std::ranges::count(config.checkpoint.exclude_from_loading, key) > 0;
}

// The optimizer keeps tensors of the same names for all parameters.
std::string optimizer_misfit(const JobConfig& config, const checkpoint::Manifest& manifest) {
  const std::vector<std::string>& kept = optim::optimizers().get(config.optimizer.name).state;
  std::set<std::string> saved, own(kept.begin(), kept.end());
  own.insert("step");
  for (const checkpoint::StateTensor& tensor : manifest.table.tensors())
    if (tensor.name.starts_with("optimizer.")) saved.insert(tensor.name.substr(tensor.name.rfind('.') + 1));
  if (saved.empty() || saved == own) return "";  // a seed checkpoint has none
  return str("was saved with another optimizer, which keeps ", c10::Join(", ", saved), "; ",
             config.optimizer.name, " keeps ", c10::Join(", ", own));
}

std::string data_misfit(const JobConfig& config, const checkpoint::Manifest& manifest,
                        const CheckedFiles& checked) {
  const auto saved = manifest.texts.find("dataloader");
  if (saved == manifest.texts.end()) return "";
  const std::string difference = data::quick_difference(
      training_feed(config, checked.tokenizer), data::loader_state_from_json(saved->second).feed_fingerprint);
  return difference.empty() ? "" : "the data have changed since the state was saved: " + difference;
}

// The reasons why a state that is loaded whole doesn't fit, besides those of its model.
std::vector<std::string> misfits_of_rest(const JobConfig& config, const fs::path& step_folder,
                                         const std::optional<CheckedFiles>& checked) {
  if (!checkpoint::quick_problems(step_folder).empty()) return {};
  const checkpoint::Manifest manifest = checkpoint::read_manifest(step_folder);
  std::vector<std::string> problems;
  const auto add = [&](const std::string& problem, const char* key) {
    if (!problem.empty())
      problems.push_back(str(step_folder.string(), ": ", problem, " (checkpoint.exclude_from_loading = [\"",
                             key, "\"] leaves its state out)"));
  };
  if (!is_excluded(config, "optimizer")) add(optimizer_misfit(config, manifest), "optimizer");
  if (checked && !is_excluded(config, "dataloader"))
    add(data_misfit(config, manifest, *checked), "dataloader");
  return problems;
}

// The folder in use is an error. Changes nothing.
void check_unused(const CheckpointSettings& settings, const fs::path& folder) {
  if (!settings.load_only) checkpoint::detail::check_unlocked(folder);
}

}  // namespace

std::string find_start(const JobConfig& config, const std::vector<Parameter>& parameters,
                       const std::optional<CheckedFiles>& checked, std::vector<std::string>& problems) {
  const CheckpointSettings& settings = config.checkpoint;
  if (!settings.enable) return "starts with random weights (checkpoint.enable = false)";
  const fs::path folder = steps_folder(config);
  check_unused(settings, folder);
  if (const auto end = end_of_run(config))
    return str("the run is complete: ", checkpoint::step_path(folder, *end).string(), " exists");
  const StepChoice choice = settings.load_step < 0
                                ? choose_newest(folder, std::numeric_limits<int64_t>::max())
                                : choose_step(folder, settings.load_step);
  if (!choice.error.empty()) throw ConfigError(choice.error);
  if (!choice.step && choice.is_damaged) refuse_damaged(folder, choice.skipped);
  InitialSource source = initial_source(config);
  if (choice.step) source = {InitialKind::Step, checkpoint::step_path(folder, *choice.step)};
  for (std::string& problem : misfits_of_source(config, source, parameters))
    problems.push_back(std::move(problem));
  if (choice.step)
    for (std::string& problem : misfits_of_rest(config, source.path, checked))
      problems.push_back(std::move(problem));
  if (source.kind == InitialKind::None) return "starts with random weights";
  return str(choice.step ? "resumes from " : "starts with the weights of ", source.path.string());
}

std::unique_ptr<RunCheckpoints> build_checkpoints(const JobConfig& config, const dist::World& world,
                                                  const Meshes& meshes,
                                                  const std::vector<Parameter>& parameters) {
  if (!config.checkpoint.enable) return nullptr;
  return std::make_unique<RunCheckpoints>(
      world, meshes, parameters,
      RunCheckpoints::Options{
          .settings = config.checkpoint,
          .folder = steps_folder(config),
          .config = config::print_toml(job_schema(), config),
          .initial = initial_state(config, meshes, parameters),
          .model_export = model_export(config),
          .peers = peer_settings(config.checkpoint, dist::read_launch(dist::process_environment())),
          .may_be_missing = {kDelayedScales}});
}

}  // namespace titan::train

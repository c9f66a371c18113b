// Checks between tables and of the files that a job reads, before anything is started: a wrong name then costs no minute of
// a cluster.

#include <algorithm>
#include <cctype>
#include <filesystem>

#include <c10/util/StringUtil.h>

#include "data/feed/replay_feed.h"
#include "data/sources/files.h"
#include "dist/device_backend.h"
#include "job/checkpoint_job.h"
#include "job/job_config.h"
#include "job/pipeline_stages.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/checkpoint/storage.h"
#include "titan/data/source.h"
#include "titan/data/tokenizer.h"
#include "titan/float8/convert.h"

namespace titan::train {

namespace {

struct Check {
  const JobConfig& config;
  const config::Origins& origins;
  std::vector<std::string> problems = {};

  void report(std::string_view key, const std::string& what) {
    problems.push_back(origins.problem(key, what));
  }
  void require(bool holds, std::string_view key, const std::string& what) {
    if (!holds) report(key, what);
  }
  void report_all(const std::vector<KeyedProblem>& found) {
    for (const KeyedProblem& problem : found) report(problem.key, problem.what);
  }
  /// Reports the errors of `action` as problems of `key`.
  template <class Action>
  void judge(std::string_view key, Action action) {
    try {
      action();
    } catch (const ConfigError& error) {
      for (const std::string& problem : error.problems()) report(key, problem);
    } catch (const Error& error) {
      report(key, error.what());
    }
  }
};

/// Returns the data-parallel degree, where the degrees fit.
std::optional<int> check_parallelism(Check& check, int world_size) {
  const ParallelDims dims = resolve_parallel_dims(check.config.parallelism, world_size);
  const auto world_problem = world_size_problem(dims, world_size);
  if (world_problem) check.report("parallelism.data_parallel_shard_degree", *world_problem);
  std::vector<KeyedProblem> misfits;
  check_divisibility(dims, check.config.spec().sizes(check.config.args()), check.config.training.seq_len,
                     misfits);
  check_pipeline(check.config, dims, misfits);
  check.report_all(misfits);

  const ParallelismSettings& parallelism = check.config.parallelism;
  check.require(!parallelism.enable_async_tensor_parallel ||
                    (parallelism.tensor_parallel_degree > 1 && parallelism.enable_sequence_parallel),
                "parallelism.enable_async_tensor_parallel",
                "needs tensor_parallel_degree above 1 and enable_sequence_parallel");
  check.require(
      parallelism.enable_async_tensor_parallel || parallelism.async_tensor_parallel_transport == "auto",
      "parallelism.async_tensor_parallel_transport", "is read only with enable_async_tensor_parallel");
  for (const std::string& name : parallelisms().names())
    for (const SettingProblem& problem :
         parallelisms().get(name)->find_problems(parallelism.settings_of(name)))
      check.report("parallelism." + problem.key, problem.what);
  const ReshardAfterForward policy = reshard_policy(parallelism.fsdp_reshard_after_forward);
  check.require(policy.kind != ReshardAfterForward::Kind::ToSize ||
                    dims.dp_shard * dims.row_degree() % policy.size == 0,
                "parallelism.fsdp_reshard_after_forward",
                str("isn't a divisor of the ", dims.dp_shard * dims.row_degree(),
                    " ranks that parameters are sharded over"));
  return world_problem ? std::nullopt : std::optional(dims.batch_degree());
}

void check_plan(Check& check) {
  const std::string& plan = check.config.parallelism.plan;
  if (!plan.empty()) check.judge("parallelism.plan", [&] { parallel_plans().get(plan); });
}

void check_model(Check& check) {
  std::vector<std::string> problems;
  check.config.spec().check(check.config.args(), problems);
  for (const std::string& problem : problems) check.problems.push_back(str("model.args: ", problem));
}

bool runs_on_cpu(const JobConfig& config) {
  const std::string& device = config.training.device;
  return device == "cpu" || (device == "auto" && !dist::gpu_visible());
}

void check_precision(Check& check) {
  const TrainingSettings& training = check.config.training;
  bool doubles = training.dtype == "float64";
  check.require((training.mixed_precision_param == "float64") == doubles, "training.mixed_precision_param",
                "float64 training has float64 in training.dtype and training.mixed_precision_param");
  check.require((training.mixed_precision_reduce == "float64") == doubles, "training.mixed_precision_reduce",
                "float64 gradients go with training.dtype = \"float64\"");
  check.require(!training.enable_cpu_offload || training.device != "cpu", "training.enable_cpu_offload",
                "offloading to the CPU needs a GPU to offload from");
}

void check_float8_gather(Check& check) {
  const float8::Float8Settings& settings = check.config.quantize.float8;
  const std::string gather = "quantize.linear.float8.enable_fsdp_float8_all_gather";
  if (settings.enable_fsdp_float8_all_gather && float8::recipes().contains(settings.recipe()))
    check.require(float8::casts_weight_once(float8::recipes().get(settings.recipe())), gather,
                  str("takes a recipe that casts a weight in one way, with one scale, as \"tensorwise\"; ",
                      settings.recipe(), " doesn't"));
  check.require(!settings.enable_fsdp_float8_all_gather || !check.config.training.enable_cpu_offload, gather,
                "doesn't go with training.enable_cpu_offload");
  check.require(settings.enable_fsdp_float8_all_gather || !settings.precompute_float8_dynamic_scale_for_fsdp,
                "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
                "is read only with enable_fsdp_float8_all_gather");
}

void check_recipe(Check& check, const char* key, const float8::ConvertOptions& options, bool blocks) {
  check.judge(key, [&] {
    float8::check_filters(options.recipe_name, options.filter_fqns);
    const bool has_blocks = float8::scales_blocks(float8::recipe_of(options));
    check.require(
        has_blocks == blocks, key,
        str(options.recipe_name, has_blocks ? " scales blocks: it is one of quantize.linear.mx"
                                            : " scales no blocks: it is one of quantize.linear.float8"));
  });
}

void check_float8(Check& check) {
  const float8::Float8Settings& settings = check.config.quantize.float8;
  check_recipe(
      check, "quantize.linear.float8.recipe_name",
      {.recipe_name = settings.recipe(), .filter_fqns = settings.filter_fqns, .delayed = settings.delayed()},
      /*blocks=*/false);
  if (!check.config.model.converts(float8::kConverter)) return;
  check_float8_gather(check);
  check.require(
      !settings.enable_fsdp_float8_all_gather || !settings.delayed().weight,
      "quantize.linear.float8.scaling_type_weight",
      "has to be \"dynamic\" with enable_fsdp_float8_all_gather, which finds the scales at the gather");
  check.require(settings.emulate || !runs_on_cpu(check.config), "quantize.linear.float8.emulate",
                "has to be true on a CPU, which has no Float8 units");
}

void check_mx(Check& check) {
  const float8::MxSettings& settings = check.config.quantize.mx;
  check_recipe(check, "quantize.linear.mx.recipe_name",
               {.recipe_name = settings.recipe_name, .filter_fqns = settings.filter_fqns},
               /*blocks=*/true);
  if (!check.config.model.converts(float8::kMxConverter)) return;
  check.require(settings.emulates() || !runs_on_cpu(check.config), "quantize.linear.mx.emulate",
                "has to be true on a CPU, which has no units for MXFP8");
}

void check_converters(Check& check) {
  const JobConfig& config = check.config;
  const ModelSettings& model = config.model;
  const auto names = [&](const char* part) {
    return std::any_of(model.converters.begin(), model.converters.end(),
                       [part](const std::string& name) { return name.find(part) != std::string::npos; });
  };
  check.require(!(names(".float8") && names(".mx")), "model.converters",
                "Float8 and MX don't mix in one model");
  for (const std::string& name : model.converters)
    check.require(name == float8::kConverter || name == float8::kMxConverter, "model.converters",
                  str("\"", name, "\" doesn't exist yet; there are \"", float8::kConverter, "\" and \"",
                      float8::kMxConverter, "\""));
  check_float8(check);
  check_mx(check);
  if (!model.converts(float8::kConverter) && !model.converts(float8::kMxConverter)) return;
  check.require(config.training.mixed_precision_param != "float64", "model.converters",
                "Float8 goes with training.mixed_precision_param of at most 32 bits");
}

void check_activations(Check& check) {
  const bool on_cpu = runs_on_cpu(check.config);
  check.require(
      check.config.activation_checkpoint.mode != "offload" || !on_cpu, "activation_checkpoint.mode",
      "moves activations from a GPU to the host's memory, and this run is on the CPU; take \"full\", "
      "\"selective\" or \"memory_budget\"");
  check.require(check.config.activation_checkpoint.mode == "memory_budget" ||
                    !check.config.activation_checkpoint.memory_budget_bytes,
                "activation_checkpoint.memory_budget_bytes",
                "is read only with activation_checkpoint.mode = \"memory_budget\"");
}

void check_profiling(Check& check) {
  const ProfilingSettings& profiling = check.config.profiling;
  const int64_t in_a_window = profiling.profiler_warmup + profiling.profiler_active;
  check.require(
      !profiling.enable_profiling || in_a_window <= profiling.profile_freq, "profiling.profile_freq",
      str("is less than profiler_warmup + profiler_active = ", in_a_window, " steps, which one trace takes"));
}

void check_model_alone(Check& check) {
  const CheckpointSettings& checkpoint = check.config.checkpoint;
  const bool has_hf_form = check.config.spec().hugging_face(check.config.args()).has_value();
  for (const auto& [key, asked] : {std::pair("checkpoint.initial_load_in_hf", checkpoint.initial_load_in_hf),
                                   std::pair("checkpoint.last_save_in_hf", checkpoint.last_save_in_hf)})
    check.require(!asked || has_hf_form, key,
                  str("model.name = ", check.config.model.name, " has no form in transformers"));
  check.require(checkpoint.initial_load_model_only || !checkpoint.initial_load_in_hf,
                "checkpoint.initial_load_model_only", "a Hugging Face folder holds the model alone");
  check.require(checkpoint.last_save_model_only || !checkpoint.last_save_in_hf, "checkpoint.last_save_in_hf",
                "needs last_save_model_only: transformers knows of models alone");
  check.require(checkpoint.last_save_model_only || checkpoint.export_dtype == "float32",
                "checkpoint.export_dtype",
                "is of the model alone; with last_save_model_only = false the state is saved as it is");
}

void check_checkpoint(Check& check, int world_size) {
  const CheckpointSettings& checkpoint = check.config.checkpoint;
  check.require(checkpoint.enable || !checkpoint.initial_load_path, "checkpoint.initial_load_path",
                "is read only with checkpoint.enable = true");
  check.require(checkpoint.enable || checkpoint.load_step < 0, "checkpoint.load_step",
                "is read only with checkpoint.enable = true");
  // A run that ignored these, for example by starting from random weights, would be for nothing.
  for (const auto& [key, asked] :
       {std::pair("checkpoint.initial_load_in_hf", checkpoint.initial_load_in_hf),
        std::pair("checkpoint.last_save_in_hf", checkpoint.last_save_in_hf),
        std::pair("checkpoint.create_seed_checkpoint", checkpoint.create_seed_checkpoint)})
    check.require(checkpoint.enable || !asked, key, "takes checkpoint.enable = true");
  check.require(checkpoint.peer_interval == 0 || (checkpoint.enable && !checkpoint.load_only),
                "checkpoint.peer_interval",
                "keeps states beside those on disk, which takes checkpoint.enable = true and no load_only");
  if (!checkpoint.enable) return;
  // A job that starts again resumes from the whole newest state.
  const bool starts_again = checkpoint.peer_interval > 0 || !check.config.fault_tolerance.requeue_on.empty();
  check.require(
      !starts_again || checkpoint.load_step == -1, "checkpoint.load_step",
      "has to be -1, the newest, beside checkpoint.peer_interval or fault_tolerance.requeue_on: each "
      "start would go back to this step");
  check.require(!starts_again || checkpoint.exclude_from_loading.empty(), "checkpoint.exclude_from_loading",
                "has to be empty beside checkpoint.peer_interval or fault_tolerance.requeue_on: each start "
                "would leave these out again");
  check_model_alone(check);
  for (const std::string& problem : exclusion_problems(checkpoint.exclude_from_loading))
    check.report("checkpoint.exclude_from_loading", problem);
  check.require(!checkpoint.create_seed_checkpoint || world_size == 1, "checkpoint.create_seed_checkpoint",
                str("is done by one rank, and there are ", world_size));
  check.require(!checkpoint.create_seed_checkpoint || !checkpoint.load_only,
                "checkpoint.create_seed_checkpoint", "saves, which load_only forbids");
}

void check_fault_tolerance(Check& check) {
  const CheckpointSettings& checkpoint = check.config.checkpoint;
  check.require(check.config.fault_tolerance.spike_sigma == 0 || (checkpoint.enable && !checkpoint.load_only),
                "fault_tolerance.spike_sigma",
                "goes back to checkpoints, which takes checkpoint.enable = true and no load_only");
}

void check_metrics(Check& check) {
  for (const std::string& sink : check.config.metrics.sinks)
    check.judge("metrics.sinks", [&] { metrics_sinks().get(sink); });
}

void check_validation(Check& check, int world_size) {
  const ValidationSettings& validation = check.config.validation;
  if (!validation.enable) return;
  check.require(validation.seq_len <= check.config.training.seq_len, "validation.seq_len",
                str("is longer than training.seq_len = ", check.config.training.seq_len));
  std::vector<KeyedProblem> misfits;
  check_sequence_length(resolve_parallel_dims(check.config.parallelism, world_size), "validation.seq_len",
                        validation.seq_len, misfits);
  check.report_all(misfits);
}

// What the job reads: data sets, recorded batches, tokenizer, initial weights. Looks at no more than names, headers and
// the tokenizer, so that it takes well under a second.

namespace fs = std::filesystem;

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

bool is_folder(const fs::path& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored);
}

/// The place where a setting's file was looked for.
std::string place_of(const fs::path& path) {
  if (path.is_absolute()) return path.string();
  const fs::path here = fs::current_path();
  return str((here / path).lexically_normal().string(),
             " (relative to the working directory, not to the config file)");
}

/// The data of [training] or [validation].
struct DatasetUse {
  std::string table;
  std::string dataset;
  std::string path;
  std::optional<int64_t> global_batch;  ///< sequences; unset: not to be judged
  std::string batch_key;                ///< which setting decides it
  int64_t seq_len = 0;
  std::optional<int64_t> steps;  ///< how many will be read; unset: as many as there are

  std::string key(const char* name) const { return table + "." + name; }
};

std::string unknown_dataset(const std::string& name) {
  std::vector<std::string> known = data::source_kinds().names();
  known.push_back(kRecordedTokens);
  const auto near = nearest_names(name, known, 1);
  return str("unknown data set; known: ", c10::Join(", ", known),
             near.empty() ? "" : str("; did you mean '", near.front(), "'?"));
}

void check_path(Check& check, const DatasetUse& use) {
  if (is_there(use.path)) return;
  if (!data::is_glob(use.path)) {
    check.report(use.key("dataset_path"), "there is nothing at " + place_of(use.path));
  } else if (data::expand_glob(use.path).empty()) {
    check.report(use.key("dataset_path"), "nothing matches " + place_of(use.path));
  }
}

// Only a user's own kind of source knows what a path means to it.
void check_source(Check& check, const DatasetUse& use) {
  std::string kind = use.dataset;
  std::transform(kind.begin(), kind.end(), kind.begin(), [](unsigned char c) { return std::tolower(c); });
  if (!data::source_kinds().contains(kind))
    return check.report(use.key("dataset"), unknown_dataset(use.dataset));
  const bool needs_path = kind == "text" || kind == "jsonl";
  if (needs_path && use.path.empty())
    return check.report(use.key("dataset"),
                        str("needs ", use.key("dataset_path"), ": a file, a folder or a glob"));
  if ((needs_path || kind == "cpp_headers") && !use.path.empty()) check_path(check, use);
}

void check_recorded_shape(Check& check, const DatasetUse& use, const std::array<int64_t, 3>& shape) {
  const auto [steps, batch, seq_len] = shape;
  if (use.steps && *use.steps > steps)
    check.report(use.key("steps"), str("is more than the ", steps, " steps recorded in ", use.path));
  if (use.global_batch && *use.global_batch != batch)
    check.report(use.batch_key, str("makes batches of ", *use.global_batch, " sequences, but ", use.path,
                                    " records batches of ", batch));
  if (use.seq_len != seq_len)
    check.report(use.key("seq_len"), str("isn't the ", seq_len, " tokens of the sequences in ", use.path));
}

void check_recording(Check& check, const DatasetUse& use) {
  const std::string key = use.key("dataset_path");
  for (const char* name : {"input.npy", "labels.npy"}) {
    if (!use.path.empty() && is_there(fs::path(use.path) / name)) continue;
    const std::string missing =
        use.path.empty() ? "" : str("there is no ", place_of(fs::path(use.path) / name), "; ");
    return check.report(key, str(missing, "\"tokens\" wants a folder with input.npy and labels.npy"));
  }
  check.judge(key, [&] {
    const data::NpyArray input(fs::path(use.path) / "input.npy"), labels(fs::path(use.path) / "labels.npy");
    if (input.shape() != labels.shape()) throw ConfigError("input.npy and labels.npy have different shapes");
    check_recorded_shape(check, use, input.shape());
  });
}

void check_dataset(Check& check, const DatasetUse& use) {
  use.dataset == kRecordedTokens ? check_recording(check, use) : check_source(check, use);
}

void check_training_data(Check& check, std::optional<int> dp_degree) {
  const TrainingSettings& training = check.config.training;
  const bool is_given = training.global_batch_size > 0;
  std::optional<int64_t> batch;
  if (is_given) batch = training.global_batch_size;
  if (!is_given && dp_degree) batch = training.local_batch_size * *dp_degree;
  check_dataset(check, {.table = "training",
                        .dataset = training.dataset,
                        .path = training.dataset_path.value_or(""),
                        .global_batch = batch,
                        .batch_key = is_given ? "training.global_batch_size" : "training.local_batch_size",
                        .seq_len = training.seq_len,
                        .steps = training.steps});
}

void check_validation_data(Check& check, std::optional<int> dp_degree) {
  const ValidationSettings& validation = check.config.validation;
  if (!validation.enable) return;
  std::optional<int64_t> batch;
  if (dp_degree) batch = validation.local_batch_size * *dp_degree;
  check_dataset(check, {.table = "validation",
                        .dataset = validation.dataset,
                        .path = validation.dataset_path.value_or(""),
                        .global_batch = batch,
                        .batch_key = "validation.local_batch_size",
                        .seq_len = validation.seq_len,
                        .steps = std::nullopt});
}

std::shared_ptr<const data::Tokenizer> check_tokenizer(Check& check) {
  const JobConfig& config = check.config;
  if (!config.reads_text()) return nullptr;
  constexpr const char* kKey = "model.hf_assets_path";
  const fs::path assets = config.model.hf_assets_path;
  const fs::path file = is_folder(assets) ? assets / "tokenizer.json" : assets;
  if (!data::names_tokenizer_kind(assets.string()) && !is_there(file)) {
    check.report(
        kKey, str("there is no ", place_of(file), "; allowed: a folder with tokenizer.json, or \"bytes\""));
    return nullptr;
  }
  std::shared_ptr<const data::Tokenizer> tokenizer;
  check.judge(kKey, [&] {
    tokenizer = data::build_tokenizer(assets);
    data::check_vocabulary(*tokenizer, config.spec().sizes(config.args()).vocab_size);
  });
  return tokenizer;
}

std::string steps_in(const fs::path& folder) {
  std::vector<std::string> steps;
  for (const checkpoint::StepEntry& entry : checkpoint::list_steps(folder))
    steps.push_back(entry.path.filename());
  return steps.empty() ? "" : "; it holds steps, of which one has to be named: " + c10::Join(", ", steps);
}

void check_initial_state(Check& check) {
  const CheckpointSettings& checkpoint = check.config.checkpoint;
  if (!checkpoint.enable) return;
  // A run that resumes from a step of its own doesn't need it any more.
  std::vector<std::string> ignored;
  if (checkpoint::newest_complete(checkpoint::joined(check.config.job.dump_folder, checkpoint.folder),
                                  ignored))
    return;
  constexpr const char* kKey = "checkpoint.initial_load_path";
  const InitialSource source = initial_source(check.config);
  if (source.kind == InitialKind::HuggingFace)
    return check.judge(checkpoint.initial_load_path ? kKey : "model.hf_assets_path",
                       [&] { check_hf_config(check.config, source.path); });
  if (source.kind == InitialKind::Nothing)
    return check.report(kKey, str("there is no safetensors file at ", place_of(source.path),
                                  ", nor a step's folder", steps_in(source.path)));
  if (source.kind == InitialKind::ModelFile && !checkpoint.initial_load_model_only)
    return check.report("checkpoint.initial_load_model_only",
                        str(source.path.string(), " holds the model alone"));
  if (source.kind == InitialKind::Step)
    for (const std::string& problem : checkpoint::quick_problems(source.path)) check.report(kKey, problem);
}

}  // namespace

CheckedFiles check_job(const JobConfig& config, const config::Origins& origins, int world_size,
                       JobFiles files) {
  Check check{config, origins};
  check_model(check);
  const std::optional<int> dp_degree = check_parallelism(check, world_size);
  check_plan(check);
  check_precision(check);
  check_converters(check);
  check_activations(check);
  check_profiling(check);
  check_checkpoint(check, world_size);
  check_fault_tolerance(check);
  check_metrics(check);
  check_validation(check, world_size);
  CheckedFiles checked;
  if (files == JobFiles::Check) {
    checked.tokenizer = check_tokenizer(check);
    check_training_data(check, dp_degree);
    check_validation_data(check, dp_degree);
    check_initial_state(check);
  }
  if (!check.problems.empty()) throw ConfigError(std::move(check.problems));
  return checked;
}

}  // namespace titan::train

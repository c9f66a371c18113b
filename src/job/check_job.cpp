// Checks settings across tables, and the files that a job reads, before anything starts: a wrong name then
// costs no cluster time.

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <limits>

#include <c10/util/StringUtil.h>

#include "checkpoint/hugging_face/model_folder.h"
#include "data/feed/feeds.h"
#include "data/sources/files.h"
#include "data/sources/stored_tokens.h"
#include "dist/device_backend.h"
#include "job/job_config.h"
#include "job/pipeline_stages.h"
#include "observe/roofline.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/checkpoint/storage.h"
#include "titan/data/source.h"
#include "titan/data/tokenizer.h"
#include "titan/float8/convert.h"

namespace titan::train {

bool runs_on_cpu(const JobConfig& config) {
  const std::string& device = config.training.device;
  return device == "cpu" || (device == "auto" && !dist::gpu_visible());
}

std::optional<int64_t> document_end(const JobConfig& config, const data::Tokenizer* tokenizer) {
  const ModelSizes sizes = config.spec().sizes(config.args());
  if (!sizes.block_causal || sizes.eos_id) return sizes.eos_id;
  // Those in files may come from another tokenizer than that of the validation's text.
  const bool reads_ids = config.training.dataset == kStoredTokens ||
                         (config.validation.enable && config.validation.dataset == kStoredTokens);
  const std::optional<int32_t> end = tokenizer && !reads_ids ? tokenizer->eos_id() : std::nullopt;
  if (!end)
    throw ConfigError(str("needs the token that ends a document, and ",
                          tokenizer && !reads_ids ? "the tokenizer has no end-of-sequence token"
                                                  : "token ids in files come without a tokenizer",
                          "; set model.args.eos_id"));
  return end;
}

namespace {

// Checks of the job's files: data sets, recorded batches, tokenizer, initial weights. They read only names,
// headers and the tokenizer, so they take well under a second.

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
  std::optional<int64_t> global_batch;  ///< sequences; unset: not checked
  std::string batch_key;                ///< the setting that determines it
  int64_t seq_len = 0;
  std::optional<int64_t> steps;  ///< steps to read; unset: all

  std::string key(const char* name) const { return table + "." + name; }
};

// For the data sets of TorchTitan's configs; "" for other names.
std::string instead_of(const std::string& dataset) {
  const auto read_files = [](const char* files) {
    return str("; it is one of TorchTitan's: use \"jsonl\" with dataset_path = ", files,
               " (docs/from_torchtitan.md)");
  };
  if (dataset == "c4_test") return read_files("TorchTitan's tests/assets/c4_test/data.json");
  if (dataset == "c4" || dataset == "c4_validation")
    return read_files(
        "the unpacked .json files of allenai/c4, which isn't streamed from the Hugging Face Hub");
  return "";
}

std::string unknown_dataset(const std::string& name) {
  std::vector<std::string> known = data::source_kinds().names();
  known.push_back(kStoredTokens);
  const std::string instead = instead_of(name);
  return str("unknown data set; known: ", c10::Join(", ", known),
             instead.empty() ? did_you_mean(name, known) : instead);
}

std::string steps_in(const fs::path& folder) {
  std::vector<std::string> steps;
  for (const checkpoint::StepEntry& entry : checkpoint::list_steps(folder))
    steps.push_back(entry.path.filename());
  return steps.empty() ? "" : "; it holds steps, name one of them: " + c10::Join(", ", steps);
}

/// The checks, and the problems that they have found.
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

  /// The key of the first degree that the world isn't a multiple of, together with those before it. A data-parallel degree of -1 is as large as
  /// the others let it be.
  std::string misfit_of_world(const ParallelDims& dims, int world_size) const {
    std::vector<std::pair<std::string, int>> degrees{{"parallelism.tensor_parallel_degree", dims.tp},
                                                     {"parallelism.pipeline_parallel_degree", dims.pp}};
    for (const RowAxis& axis : dims.rows) degrees.emplace_back("parallelism." + axis.degree_key, axis.degree);
    degrees.emplace_back("parallelism.data_parallel_replicate_degree", dims.dp_replicate);
    int product = 1;
    for (const auto& [key, degree] : degrees)
      if (world_size % (product = ParallelDims::product(product, degree)) != 0) return key;
    return "parallelism.data_parallel_shard_degree";
  }

  /// Returns the data-parallel degree, or nullopt if the degrees don't fit the world.
  std::optional<int> check_parallelism(int world_size) {
    const ParallelDims dims = resolve_parallel_dims(config.parallelism, world_size);
    const auto world_problem = world_size_problem(dims, world_size);
    if (world_problem) report(misfit_of_world(dims, world_size), *world_problem);
    // Products of such degrees say nothing.
    if (dims.world_size() == std::numeric_limits<int>::max()) {
      if (!world_problem) report("parallelism", "the degrees' product is more than any world has");
      return std::nullopt;
    }
    std::vector<KeyedProblem> misfits;
    check_divisibility(dims, config.spec().sizes(config.args()), config.training.seq_len, misfits);
    check_pipeline(config, dims, misfits);
    report_all(misfits);

    const ParallelismSettings& parallelism = config.parallelism;
    require(!parallelism.enable_async_tensor_parallel ||
                (parallelism.tensor_parallel_degree > 1 && parallelism.enable_sequence_parallel),
            "parallelism.enable_async_tensor_parallel",
            "needs tensor_parallel_degree above 1 and enable_sequence_parallel");
    require(parallelism.enable_async_tensor_parallel || parallelism.async_tensor_parallel_transport == "auto",
            "parallelism.async_tensor_parallel_transport", "is read only with enable_async_tensor_parallel");
    for (const std::string& name : parallelisms().names())
      for (const SettingProblem& problem :
           parallelisms().get(name)->find_problems(parallelism.settings_of(name)))
        report("parallelism." + problem.key, problem.what);
    const ReshardAfterForward policy = reshard_policy(parallelism.fsdp_reshard_after_forward);
    require(policy.kind != ReshardAfterForward::Kind::ToSize ||
                dims.dp_shard * dims.row_degree() % policy.size == 0,
            "parallelism.fsdp_reshard_after_forward",
            str("isn't a divisor of the ", dims.dp_shard * dims.row_degree(),
                " ranks that parameters are sharded over"));
    return world_problem ? std::nullopt : std::optional(dims.batch_degree());
  }

  void check_plan() {
    const std::string& plan = config.parallelism.plan;
    if (!plan.empty()) judge("parallelism.plan", [&] { parallel_plans().get(plan); });
  }

  void check_model() {
    std::vector<std::string> found;
    config.spec().check(config.args(), found);
    for (const std::string& problem : found)
      problems.push_back(problem.starts_with("model.args") ? problem : str("model.args: ", problem));
    const ActivationCheckpointSettings& activations = config.activation_checkpoint;
    if (activations.mode != "selective" || activations.selective_ac_option == "op" || !found.empty()) return;
    const int64_t layers = config.spec().sizes(config.args()).num_layers;
    require(layers == 0 || std::stoll(activations.selective_ac_option) <= layers,
            "activation_checkpoint.selective_ac_option", str("selects no layer: the model has ", layers));
  }

  // The key is that of the Llamas, and the one to use in other families.
  static constexpr const char* kMaskKey = "model.args.attn_mask_type";

  void check_document_mask() {
    if (!config.spec().sizes(config.args()).block_causal) return;
    for (const Parallelism& parallelism : chosen_parallelisms(config.parallelism)) {
      const RowAxis& axis = parallelism.axis;
      require(axis.degree == 1, kMaskKey,
              str("can't be combined with parallelism.", axis.degree_key, " = ", axis.degree,
                  ": a rank attends to parts of a row, which doesn't leave out other documents"));
    }
    require(
        !config.compile.enable, kMaskKey,
        "can't be combined with compile.enable: documents have other sizes in each step, and a CUDA graph "
        "repeats the sizes of the recorded one");
  }

  // Without a tokenizer that the job reads, its own problem is reported.
  void check_document_end(const data::Tokenizer* tokenizer) {
    if (tokenizer || !config.reads_text()) judge(kMaskKey, [&] { document_end(config, tokenizer); });
  }

  void check_precision() {
    const TrainingSettings& training = config.training;
    bool doubles = training.dtype == "float64";
    require((training.mixed_precision_param == "float64") == doubles, "training.mixed_precision_param",
            "must be \"float64\" exactly when training.dtype is");
    require((training.mixed_precision_reduce == "float64") == doubles, "training.mixed_precision_reduce",
            "must be \"float64\" exactly when training.dtype is");
    const optim::OptimizerSettings& optimizer = config.optimizer;
    const std::pair<const char*, bool> own_steps[] = {
        {"optimizer.state_dtype", optimizer.state_dtype.has_value()},
        {"optimizer.stochastic_rounding", optimizer.stochastic_rounding}};
    const bool reads_them = !optim::optimizers().contains(optimizer.name) ||
                            optim::optimizers().get(optimizer.name).reads_state_dtype;
    for (const auto& [key, on] : own_steps) {
      require(!on || reads_them, key, str("isn't read by the optimizer \"", optimizer.name, "\""));
      require(!on || !doubles, key, "can't be combined with training.dtype = \"float64\"");
      require(!on || optimizer.implementation == "fused", key, "needs optimizer.implementation = \"fused\"");
    }
    require(
        !optimizer.stochastic_rounding || training.dtype == "bfloat16" || optimizer.state_dtype == "bfloat16",
        "optimizer.stochastic_rounding",
        "rounds to bfloat16: set optimizer.state_dtype or training.dtype to \"bfloat16\"");
    require(!training.enable_cpu_offload || training.device != "cpu", "training.enable_cpu_offload",
            "offloading to the CPU needs a GPU to offload from");
  }

  void check_float8_gather() {
    const float8::Float8Settings& settings = config.quantize.float8;
    const std::string gather = "quantize.linear.float8.enable_fsdp_float8_all_gather";
    if (settings.enable_fsdp_float8_all_gather && float8::recipes().contains(settings.recipe()))
      require(float8::casts_weight_once(float8::recipes().get(settings.recipe())), gather,
              str("needs a recipe that casts a weight in one way, with one scale, such as \"tensorwise\"; ",
                  settings.recipe(), " doesn't"));
    require(!settings.enable_fsdp_float8_all_gather || !config.training.enable_cpu_offload, gather,
            "can't be combined with training.enable_cpu_offload");
    require(settings.enable_fsdp_float8_all_gather || !settings.precompute_float8_dynamic_scale_for_fsdp,
            "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
            "is read only with enable_fsdp_float8_all_gather");
  }

  void check_recipe(const char* key, const float8::ConvertOptions& options, bool blocks) {
    judge(key, [&] {
      float8::check_filters(options.recipe_name, options.filter_fqns);
      const bool has_blocks = float8::scales_blocks(float8::recipe_of(options));
      require(
          has_blocks == blocks, key,
          str(options.recipe_name, has_blocks ? " scales blocks: it is one of quantize.linear.mx"
                                              : " scales no blocks: it is one of quantize.linear.float8"));
    });
  }

  void check_float8() {
    const float8::Float8Settings& settings = config.quantize.float8;
    check_recipe("quantize.linear.float8.recipe_name",
                 {.recipe_name = settings.recipe(),
                  .filter_fqns = settings.filter_fqns,
                  .delayed = settings.delayed()},
                 /*blocks=*/false);
    if (!config.model.converts(float8::kConverter)) return;
    check_float8_gather();
    require(!settings.enable_fsdp_float8_all_gather || !settings.delayed().weight,
            "quantize.linear.float8.scaling_type_weight",
            "has to be \"dynamic\" with enable_fsdp_float8_all_gather, which finds the scales at the gather");
    require(settings.emulate || !runs_on_cpu(config), "quantize.linear.float8.emulate",
            "has to be true on a CPU, which has no Float8 units");
  }

  void check_mx() {
    const float8::MxSettings& settings = config.quantize.mx;
    check_recipe("quantize.linear.mx.recipe_name",
                 {.recipe_name = settings.recipe_name, .filter_fqns = settings.filter_fqns},
                 /*blocks=*/true);
    if (!config.model.converts(float8::kMxConverter)) return;
    require(settings.emulates() || !runs_on_cpu(config), "quantize.linear.mx.emulate",
            "has to be true on a CPU, which has no units for MXFP8");
  }

  void check_converters() {
    const ModelSettings& model = config.model;
    const auto names = [&](const char* part) {
      return std::any_of(model.converters.begin(), model.converters.end(),
                         [part](const std::string& name) { return name.find(part) != std::string::npos; });
    };
    require(!(names(".float8") && names(".mx")), "model.converters", "Float8 and MX don't mix in one model");
    for (const std::string& name : model.converters)
      require(name == float8::kConverter || name == float8::kMxConverter, "model.converters",
              str("unknown converter \"", name, "\"; known: \"", float8::kConverter, "\" and \"",
                  float8::kMxConverter, "\""));
    check_float8();
    check_mx();
    if (!model.converts(float8::kConverter) && !model.converts(float8::kMxConverter)) return;
    require(config.training.mixed_precision_param != "float64", "model.converters",
            "Float8 requires training.mixed_precision_param of at most 32 bits");
  }

  void check_activations() {
    const bool on_cpu = runs_on_cpu(config);
    require(config.activation_checkpoint.mode != "offload" || !on_cpu, "activation_checkpoint.mode",
            "moves activations from a GPU to the host's memory, and this run is on the CPU; use \"full\", "
            "\"selective\" or \"memory_budget\"");
    require(config.activation_checkpoint.mode == "memory_budget" ||
                !config.activation_checkpoint.memory_budget_bytes,
            "activation_checkpoint.memory_budget_bytes",
            "is read only with activation_checkpoint.mode = \"memory_budget\"");
  }

  void check_profiling() {
    const ProfilingSettings& profiling = config.profiling;
    const int64_t in_a_window = profiling.profiler_warmup + profiling.profiler_active;
    require(!profiling.enable_profiling || in_a_window <= profiling.profile_freq, "profiling.profile_freq",
            str("is less than profiler_warmup + profiler_active = ", in_a_window,
                " steps, which one trace needs"));
  }

  void check_model_alone() {
    const CheckpointSettings& checkpoint = config.checkpoint;
    const bool has_hf_form = config.spec().hugging_face(config.args()).has_value();
    for (const auto& [key, asked] :
         {std::pair("checkpoint.initial_load_in_hf", checkpoint.initial_load_in_hf),
          std::pair("checkpoint.last_save_in_hf", checkpoint.last_save_in_hf)})
      require(!asked || has_hf_form, key,
              str("model.name = ", config.model.name, " has no form in transformers"));
    require(checkpoint.initial_load_model_only || !checkpoint.initial_load_in_hf,
            "checkpoint.initial_load_model_only", "a Hugging Face folder holds only the model");
    require(checkpoint.last_save_model_only || !checkpoint.last_save_in_hf, "checkpoint.last_save_in_hf",
            "needs last_save_model_only: transformers reads only models");
    require(checkpoint.last_save_model_only || checkpoint.export_dtype == "float32",
            "checkpoint.export_dtype",
            "applies to the model alone; with last_save_model_only = false the state is saved unchanged");
  }

  void check_checkpoint(int world_size) {
    const CheckpointSettings& checkpoint = config.checkpoint;
    require(!checkpoint.enable || config.comm.mode == "default", "checkpoint.enable",
            "must be false with comm.mode = \"fake_backend\": the other ranks' parts don't exist");
    require(checkpoint.enable || !checkpoint.initial_load_path, "checkpoint.initial_load_path",
            "is read only with checkpoint.enable = true");
    require(checkpoint.enable || checkpoint.load_step < 0, "checkpoint.load_step",
            "is read only with checkpoint.enable = true");
    // A run that ignored these, for example by starting from random weights, would be wasted.
    for (const auto& [key, asked] :
         {std::pair("checkpoint.initial_load_in_hf", checkpoint.initial_load_in_hf),
          std::pair("checkpoint.last_save_in_hf", checkpoint.last_save_in_hf),
          std::pair("checkpoint.create_seed_checkpoint", checkpoint.create_seed_checkpoint)})
      require(checkpoint.enable || !asked, key, "needs checkpoint.enable = true");
    require(checkpoint.peer_interval == 0 || (checkpoint.enable && !checkpoint.load_only),
            "checkpoint.peer_interval",
            "keeps states besides those on disk, which needs checkpoint.enable = true and no load_only");
    if (!checkpoint.enable) return;
    // A job that starts again resumes from the whole newest state.
    const bool starts_again = checkpoint.peer_interval > 0 || !config.fault_tolerance.requeue_on.empty();
    require(!starts_again || checkpoint.load_step == -1, "checkpoint.load_step",
            "has to be -1 (the newest) with checkpoint.peer_interval or fault_tolerance.requeue_on: each "
            "start would go back to this step");
    require(!starts_again || checkpoint.exclude_from_loading.empty(), "checkpoint.exclude_from_loading",
            "has to be empty with checkpoint.peer_interval or fault_tolerance.requeue_on: each start "
            "would leave these out again");
    check_model_alone();
    for (const std::string& problem : exclusion_problems(checkpoint.exclude_from_loading))
      report("checkpoint.exclude_from_loading", problem);
    require(!checkpoint.create_seed_checkpoint || world_size == 1, "checkpoint.create_seed_checkpoint",
            str("needs exactly one rank; this job has ", world_size));
    require(!checkpoint.create_seed_checkpoint || !checkpoint.load_only, "checkpoint.create_seed_checkpoint",
            "saves, which load_only forbids");
  }

  void check_fault_tolerance() {
    const CheckpointSettings& checkpoint = config.checkpoint;
    require(config.fault_tolerance.spike_sigma == 0 || (checkpoint.enable && !checkpoint.load_only),
            "fault_tolerance.spike_sigma",
            "goes back to checkpoints, which needs checkpoint.enable = true and no load_only");
  }

  void check_metrics() {
    for (const std::string& sink : config.metrics.sinks)
      judge("metrics.sinks", [&] { metrics_sinks().get(sink); });
    if (config.metrics.report_roofline) check_roofline();
  }

  void check_roofline() {
    constexpr const char* kKey = "metrics.report_roofline";
    constexpr int64_t kSteps = RooflineReport::kWarmUpSteps + 1;
    require(config.training.steps >= kSteps, kKey,
            str("measures the step after ", RooflineReport::kWarmUpSteps,
                " others, and training.steps = ", config.training.steps));
    require(!config.profiling.enable_profiling && !config.profiling.enable_memory_snapshot, kKey,
            "can't be combined with profiling.enable_profiling or profiling.enable_memory_snapshot, whose "
            "work would be part of the times");
    require(!config.training.enable_cpu_offload, kKey,
            "can't be combined with training.enable_cpu_offload: the optimizer then runs on the host, beside "
            "the device whose time is measured");
    require(
        config.comm.trace_buf_size > 0, kKey,
        "takes the times of collectives from the flight recorder, which comm.trace_buf_size = 0 turns off");
  }

  // Each of these waits for the device or for other ranks in the middle of a step, or must see it run.
  void check_graphs(int world_size) {
    if (!config.compile.enable) return;
    constexpr const char* kKey = "compile.enable";
    require(!runs_on_cpu(config), kKey, "records steps as CUDA graphs, which a CPU doesn't have");
    require(config.optimizer.implementation == "fused", kKey,
            "needs optimizer.implementation = \"fused\": the others wait for the device in each step");
    require(config.activation_checkpoint.mode != "offload", kKey,
            "can't be combined with activation_checkpoint.mode = \"offload\", which moves data on the host");
    require(world_size == 1 || config.comm.backend != "gloo", kKey,
            "can't be combined with comm.backend = \"gloo\", which copies through the host");
    const std::pair<const char*, bool> others[] = {
        {"training.enable_cpu_offload", config.training.enable_cpu_offload},
        {"debug.check_collectives", config.debug.check_collectives},
        {"debug.detect_anomaly", config.debug.detect_anomaly},
        {"debug.nan_trace", config.debug.nan_trace},
        {"metrics.report_roofline", config.metrics.report_roofline},
    };
    for (const auto& [key, on] : others) require(!on, kKey, str("can't be combined with ", key));
  }

  void check_registration(int world_size) {
    if (!config.comm.register_buffers) return;
    constexpr const char* kKey = "comm.register_buffers";
    require(!runs_on_cpu(config), kKey, "registers a GPU's memory with NCCL, and this run is on the CPU");
    require(world_size == 1 || config.comm.backend != "gloo", kKey,
            "can't be combined with comm.backend = \"gloo\": only NCCL registers memory");
    require(config.comm.mode != "fake_backend", kKey,
            "can't be combined with comm.mode = \"fake_backend\", which has no peers to share memory with");
    require(!config.training.enable_cpu_offload, kKey,
            "can't be combined with training.enable_cpu_offload, which reduces into the host's memory");
    require(!config.compile.enable, kKey,
            "can't be combined with compile.enable: a recorded step has memory of its own, which isn't "
            "registered");
  }

  void check_validation(int world_size) {
    const ValidationSettings& validation = config.validation;
    if (!validation.enable) return;
    require(validation.seq_len <= config.training.seq_len, "validation.seq_len",
            str("is longer than training.seq_len = ", config.training.seq_len));
    std::vector<KeyedProblem> misfits;
    check_sequence_length(resolve_parallel_dims(config.parallelism, world_size), "validation.seq_len",
                          validation.seq_len, misfits);
    report_all(misfits);
  }

  void check_path(const DatasetUse& use) {
    if (is_there(use.path)) return;
    if (!data::is_glob(use.path)) {
      report(use.key("dataset_path"), "there is nothing at " + place_of(use.path));
    } else if (data::expand_glob(use.path).empty()) {
      report(use.key("dataset_path"), "nothing matches " + place_of(use.path));
    }
  }

  // For a user's own kind of source the path isn't checked: only the source knows its meaning.
  void check_source(const DatasetUse& use) {
    std::string kind = use.dataset;
    std::transform(kind.begin(), kind.end(), kind.begin(), [](unsigned char c) { return std::tolower(c); });
    if (!data::source_kinds().contains(kind)) return report(use.key("dataset"), unknown_dataset(use.dataset));
    const bool needs_path = kind == "text" || kind == "jsonl";
    if (needs_path && use.path.empty())
      return report(use.key("dataset"),
                    str("needs ", use.key("dataset_path"), ": a file, a folder or a glob"));
    const size_t before = problems.size();
    if ((needs_path || kind == "cpp_headers") && !use.path.empty()) check_path(use);
    if (problems.size() > before) return;
    judge(use.key("dataset_path"),
          [&] { data::check_files(kind, {.path = use.path, .settings = config.data, .cache_folder = {}}); });
  }

  void check_recorded_shape(const DatasetUse& use, const std::array<int64_t, 3>& shape) {
    const auto [steps, batch, seq_len] = shape;
    if (use.steps && *use.steps > steps)
      report(use.key("steps"), str("is more than the ", steps, " steps recorded in ", use.path));
    if (use.global_batch && *use.global_batch != batch)
      report(use.batch_key, str("makes batches of ", *use.global_batch, " sequences, but ", use.path,
                                " records batches of ", batch));
    if (use.seq_len != seq_len)
      report(use.key("seq_len"), str("must be ", seq_len, ", the length of the sequences in ", use.path));
  }

  void check_recording(const DatasetUse& use) {
    const std::string key = use.key("dataset_path");
    for (const char* name : {"input.npy", "labels.npy"})
      if (!is_there(fs::path(use.path) / name))
        return report(key, str("there is no ", place_of(fs::path(use.path) / name),
                               "; recorded batches are a folder with input.npy and labels.npy"));
    judge(key, [&] {
      const data::NpyArray input(fs::path(use.path) / "input.npy"), labels(fs::path(use.path) / "labels.npy");
      if (input.shape() != labels.shape())
        throw ConfigError("input.npy and labels.npy have different shapes");
      check_recorded_shape(use, input.shape());
    });
  }

  void check_tokens(const DatasetUse& use) {
    const std::string key = use.key("dataset_path");
    if (use.path.empty())
      return report(
          key,
          "data set \"tokens\" needs rows of token ids (.bin or .npy: a file, a folder or a glob), or "
          "a folder with input.npy and labels.npy");
    if (data::ReplayFeed::is_recording(use.path)) return check_recording(use);
    const size_t before = problems.size();
    check_path(use);
    if (problems.size() > before) return;
    judge(key, [&] {
      data::StoredTokens({.path = use.path, .settings = config.data, .cache_folder = {}},
                         config.spec().sizes(config.args()).vocab_size);
    });
  }

  void check_dataset(const DatasetUse& use) {
    use.dataset == kStoredTokens ? check_tokens(use) : check_source(use);
  }

  /// `settings`: the table of that name. `global_batch`: sequences; not positive: the sum over all ranks.
  void check_data(const std::string& table, const auto& settings, int64_t global_batch,
                  std::optional<int> dp_degree, std::optional<int64_t> steps) {
    const bool is_given = global_batch > 0;
    std::optional<int64_t> batch;
    if (is_given) batch = global_batch;
    if (!is_given && dp_degree) batch = settings.local_batch_size * *dp_degree;
    check_dataset({.table = table,
                   .dataset = settings.dataset,
                   .path = settings.dataset_path.value_or(""),
                   .global_batch = batch,
                   .batch_key = table + (is_given ? ".global_batch_size" : ".local_batch_size"),
                   .seq_len = settings.seq_len,
                   .steps = steps});
  }

  std::shared_ptr<const data::Tokenizer> check_tokenizer() {
    if (!config.reads_text()) return nullptr;
    constexpr const char* kKey = "model.hf_assets_path";
    const fs::path assets = config.model.hf_assets_path;
    const fs::path file = is_folder(assets) ? assets / "tokenizer.json" : assets;
    if (!data::names_tokenizer_kind(assets.string()) && !is_there(file)) {
      report(kKey,
             str("there is no ", place_of(file), "; allowed: a folder with tokenizer.json, or \"bytes\""));
      return nullptr;
    }
    std::shared_ptr<const data::Tokenizer> tokenizer;
    judge(kKey, [&] {
      tokenizer = data::build_tokenizer(assets);
      data::check_vocabulary(*tokenizer, config.spec().sizes(config.args()).vocab_size);
    });
    return tokenizer;
  }

  void check_initial_state() {
    const CheckpointSettings& checkpoint = config.checkpoint;
    if (!checkpoint.enable) return;
    // A run that resumes from one of its own steps doesn't need it.
    std::vector<std::string> ignored;
    if (checkpoint::newest_complete(checkpoint::joined(config.job.dump_folder, checkpoint.folder), ignored))
      return;
    constexpr const char* kKey = "checkpoint.initial_load_path";
    const InitialSource source = initial_source(config);
    if (source.kind == InitialKind::HuggingFace)
      return judge(checkpoint.initial_load_path ? kKey : "model.hf_assets_path",
                   [&] { check_hf_config(config, source.path); });
    if (source.kind == InitialKind::Nothing)
      return report(kKey, str("there is no safetensors file at ", place_of(source.path),
                              ", nor a step's folder", steps_in(source.path)));
    if (source.kind == InitialKind::ModelFile && is_folder(source.path))
      judge(kKey, [&] {
        if (titan::detail::has_hf_names(source.path) && config.spec().hugging_face(config.args()))
          throw ConfigError(
              str(source.path.string(), " has Hugging Face's names; set checkpoint.initial_load_in_hf"));
      });
    if (source.kind == InitialKind::ModelFile && !checkpoint.initial_load_model_only)
      return report("checkpoint.initial_load_model_only", str(source.path.string(), " holds only the model"));
    if (source.kind == InitialKind::Step)
      for (const std::string& problem : checkpoint::quick_problems(source.path)) report(kKey, problem);
  }
};

}  // namespace

CheckedFiles check_job(const JobConfig& config, const config::Origins& origins, int world_size,
                       JobFiles files) {
  Check check{config, origins};
  for (const auto& [key, degree] : {std::pair("tensor", config.parallelism.tensor_parallel_degree),
                                    std::pair("context", config.parallelism.context.degree),
                                    std::pair("pipeline", config.parallelism.pipeline_parallel_degree)})
    if (degree == 0)
      throw ConfigError(
          origins.problem(str("parallelism.", key, "_parallel_degree"),
                          "\"auto\" is chosen for the ranks of titan train --nproc N; give the degree here"));
  check.check_model();
  const std::optional<int> dp_degree = check.check_parallelism(world_size);
  check.check_plan();
  check.check_document_mask();
  check.check_precision();
  check.check_converters();
  check.check_activations();
  check.check_profiling();
  check.check_checkpoint(world_size);
  check.check_fault_tolerance();
  check.check_metrics();
  check.check_graphs(world_size);
  check.check_registration(world_size);
  check.check_validation(world_size);
  CheckedFiles checked;
  if (files != JobFiles::Ignore) {
    checked.tokenizer = check.check_tokenizer();
    check.check_document_end(checked.tokenizer.get());
  }
  if (files == JobFiles::Check) {
    const TrainingSettings& training = config.training;
    check.check_data("training", training, training.global_batch_size, dp_degree, training.steps);
    if (config.validation.enable)
      check.check_data("validation", config.validation, /*global_batch=*/-1, dp_degree, std::nullopt);
    check.check_initial_state();
  }
  if (!check.problems.empty()) throw ConfigError(std::move(check.problems));
  return checked;
}

}  // namespace titan::train

#include "job/settings.h"

#include <strings.h>
#include <algorithm>

#include "titan/core/error.h"
#include "titan/parallel/pipeline_schedule.h"

namespace titan::train {

void describe(config::Table<ModelSettings>& table) {
  table.field("name", &ModelSettings::name,
              "model family, or \"auto\" for the architecture and sizes of config.json in hf_assets_path");
  table.field("flavor", &ModelSettings::flavor, "sizes of the family; keys of [model.args] override them");
  table.field("hf_assets_path", &ModelSettings::hf_assets_path,
              "folder with the tokenizer's tokenizer.json, from the working directory if it is relative, or "
              "\"bytes\" for a token per byte");
  table.mapped("tokenizer_path", "hf_assets_path", "deprecated in TorchTitan");
  table.field("converters", &ModelSettings::converters,
              "rewrites of the model before it is parallelized: \"quantize.linear.float8\" or "
              "\"quantize.linear.mx\"; the other names of TorchTitan are refused",
              config::one_of({"quantize.linear.float8", "quantize.linear.mx", "quantize.grouped_mm.float8",
                              "quantize.grouped_mm.mx"}));
  table.field("print_after_conversion", &ModelSettings::print_after_conversion,
              "log for each linear layer whether it was converted, or why not");
}

bool ModelSettings::converts(const std::string& name) const {
  return std::find(converters.begin(), converters.end(), name) != converters.end();
}

void describe(config::Table<TrainingSettings>& table) {
  table.field("dataset", &TrainingSettings::dataset, "data source; see docs/data.md");
  table.field("dataset_path", &TrainingSettings::dataset_path,
              "file, folder or glob that the source reads, from the working directory if it is relative");
  table.field("local_batch_size", &TrainingSettings::local_batch_size,
              "sequences per data-parallel rank and micro-batch", config::at_least(1));
  table.field("global_batch_size", &TrainingSettings::global_batch_size,
              "sequences per optimizer step, by accumulation where needed; -1: local_batch_size x "
              "data-parallel ranks",
              config::positive_or_minus_one());
  table.field("seq_len", &TrainingSettings::seq_len, "tokens per sequence", config::at_least(1));
  table.table("dataloader", &TrainingSettings::dataloader);
  table.field(
      "dtype", &TrainingSettings::dtype,
      "dtype of the parameters that the optimizer owns, and of its states if optimizer.state_dtype is unset",
      config::one_of({"float32", "bfloat16", "float64"}));
  table.field("mixed_precision_param", &TrainingSettings::mixed_precision_param,
              "dtype of the parameters in forward and backward",
              config::one_of({"bfloat16", "float32", "float64"}));
  table.field("mixed_precision_reduce", &TrainingSettings::mixed_precision_reduce,
              "dtype in which gradients are summed over ranks", config::one_of({"float32", "float64"}));
  table.field("max_norm", &TrainingSettings::max_norm, "gradients are scaled down to this 2-norm",
              config::at_least(0));
  table.field("steps", &TrainingSettings::steps, "optimizer steps", config::at_least(1));
  table.field("enable_cpu_offload", &TrainingSettings::enable_cpu_offload,
              "keep sharded parameters, gradients and optimizer states in pinned host memory; GPUs only");
  table.without_effect("gc_freq", int64_t{50}, "paces Python's garbage collector, which doesn't exist here",
                       config::at_least(1));
  table.without_effect("gc_debug", false, "is about Python's garbage collector, which doesn't exist here");
  table.field("device", &TrainingSettings::device, "\"auto\" takes a GPU if there is one",
              config::one_of({"auto", "cpu", "cuda"}));
}

int64_t TrainingSettings::batches_per_step(int dp_degree) const {
  const int64_t rows = local_batch_size * dp_degree;
  return global_batch_size < 0 ? 1 : (global_batch_size + rows - 1) / rows;
}

at::ScalarType scalar_type(const std::string& name) {
  if (name == "float32") return at::kFloat;
  if (name == "bfloat16") return at::kBFloat16;
  if (name == "float16") return at::kHalf;
  if (name == "float64") return at::kDouble;
  throw ConfigError(str("unknown dtype '", name, "'; known: float32 bfloat16 float16 float64"));
}

void describe(config::Table<JobSettings>& table) {
  table.field("config_file", &JobSettings::config_file,
              "config file, the same as the argument of titan train");
  table.field("dump_folder", &JobSettings::dump_folder, "folder for everything that the run writes");
  table.field("description", &JobSettings::description, "free text, logged at the start");
  table.field("print_config", &JobSettings::print_config, "log the resolved config at the start");
  table.field("save_config_file", &JobSettings::save_config_file,
              "also save the resolved config under this name in dump_folder (config.toml is always saved)");
  table.refused("custom_config_module", std::string(),
                "settings of your own come with your code: see docs/extending.md");
}

void describe(config::Table<DebugSettings>& table) {
  table.field(
      "seed", &DebugSettings::seed,
      "seed of weights, of the data's order (unless data.seed is set) and, plus the data-parallel rank, "
      "of LibTorch's generators (dropout); unset: 0, so that equal configs give equal runs",
      config::at_least(0));
  table.field("deterministic", &DebugSettings::deterministic,
              "deterministic GPU kernels only (CPU runs are bit-equal anyway)");
  table.field("deterministic_warn_only", &DebugSettings::deterministic_warn_only,
              "with deterministic: warn, instead of stopping, if no deterministic kernel exists");
  table.field(
      "check_collectives", &DebugSettings::check_collectives,
      "compare every collective call with the group's other ranks before it starts (operation, "
      "sizes, dtype, label, group), and received tensors with sent ones: a difference stops all of them "
      "with an error that names the calls; slow");
  table.field(
      "detect_anomaly", &DebugSettings::detect_anomaly,
      "autograd's anomaly mode: stop at the first operation whose backward makes a non-finite gradient, and "
      "name the operation, the module that recorded it and the stack of that forward; very slow");
  table.field("nan_trace", &DebugSettings::nan_trace,
              "check every module's outputs and gradients: stop at the first that isn't finite, and name the "
              "module, step and rank, with statistics of its inputs; slow");
  table.refused("moe_force_load_balance", false, "there are no mixture-of-experts models yet");
}

void describe(config::Table<ExperimentalSettings>& table) {
  table.field(
      "custom_import", &ExperimentalSettings::custom_import,
      "shared object whose titan_register() adds models, data sources, ... by name; see docs/extending.md");
  table.refused("custom_args_module", std::string(), "deprecated in TorchTitan; see docs/extending.md");
}

void describe(config::Table<CompileSettings>& table) {
  table.field(
      "enable", &CompileSettings::enable,
      "record forward, backward, clipping and optimizer as CUDA graphs that each step launches; there is no "
      "other compiler, because fused operations are written out (docs/gpu_performance.md)");
  const char* whole = "CUDA graphs have the whole step, and no compiler makes its kernels";
  table.refused("components", config::StringList{"model", "loss"}, whole, "enable",
                config::one_of({"model", "loss"}));
  table.refused("backend", std::string("inductor"), whole, "enable");
}

void describe(config::Table<MemoryEstimationSettings>& table) {
  table.refused("enable", false, "titan plan tells what a job takes");
  table.refused("disable_fake_mode", false, "titan plan tells what a job takes", "enable");
}

void describe(config::Table<CommSettings>& table) {
  table.field(
      "init_timeout_seconds", &CommSettings::init_timeout_seconds,
      "time limit of the rendezvous, and of computing and collectives up to the end of the first step",
      config::at_least(1));
  table.field(
      "train_timeout_seconds", &CommSettings::train_timeout_seconds,
      "time limit of computing and of collectives after the first step, counted while a rank makes no "
      "progress",
      config::at_least(1));
  table.field("data_timeout_seconds", &CommSettings::data_timeout_seconds,
              "time limit of waiting for a step's data", config::at_least(1));
  table.field("checkpoint_timeout_seconds", &CommSettings::checkpoint_timeout_seconds,
              "time limit of loading or saving without progress; unset: checkpoint.timeout_seconds and a "
              "minute, so that a save's own error comes first",
              config::at_least(1));
  table.field("watchdog", &CommSettings::watchdog,
              "when a rank hangs, have every rank print the stacks of its threads, name the culprit and end; "
              "false: only collectives have time limits");
  table.field("backend", &CommSettings::backend,
              "\"auto\" is nccl on GPUs and gloo on CPUs; gloo also lets several ranks share a GPU",
              config::one_of({"auto", "gloo", "nccl"}));
  table.field("trace_buf_size", &CommSettings::trace_buf_size,
              "calls that each rank's flight recorder keeps, about 256 bytes each; 0 keeps none",
              config::in_range(0, 500000));
  table.field(
      "save_traces_folder", &CommSettings::save_traces_folder,
      "folder under job.dump_folder for the flight records: written when a rank fails, crashes or gets "
      "SIGQUIT, and by titan debug dump; titan debug flight reads them");
  table.field("save_traces_file_prefix", &CommSettings::save_traces_file_prefix,
              "prefix of their file names; the rank and .json follow");
  config::Constraint modes = config::one_of({"default", "fake_backend"});
  modes.allowed +=
      "; TorchTitan's \"local_tensor\" computes all ranks in one process with a tensor type of Python's: on "
      "CPUs, "
      "--nproc starts a process for each rank";
  table.field("mode", &CommSettings::mode,
              "\"fake_backend\": one process is rank 0 of the --nproc ranks, and its collectives return at "
              "once without "
              "data of others, to try shapes and memory; losses mean nothing",
              modes);
  table.field("register_buffers", &CommSettings::register_buffers,
              "register FSDP's communication buffers and gradients with NCCL, which may then move data "
              "straight between them; idle buffers are kept (docs/decisions/registered_buffers.md)");
}

namespace {

bool is_count(const std::string& text) {
  return !text.empty() && text.size() < 10 && text.find_first_not_of("0123456789") == std::string::npos;
}

config::Constraint reshard_name() {
  return {"\"default\", \"always\", \"never\" or an integer >= 1 in quotes",
          [](const config::Value& value) {
            const auto& name = std::get<std::string>(value);
            return name == "default" || name == "always" || name == "never" ||
                   (is_count(name) && std::stoi(name) > 0);
          },
          {"default", "always", "never"}};
}

void describe_tensor_parallel(config::Table<ParallelismSettings>& table) {
  table.field("tensor_parallel_degree", &ParallelismSettings::tensor_parallel_degree,
              "ranks that share each layer's products, or \"auto\": the plan's choice for the ranks of "
              "--nproc (docs/plan.md)",
              config::positive_or_auto());
  table.field("enable_sequence_parallel", &ParallelismSettings::enable_sequence_parallel,
              "with tensor parallelism: between the products each rank keeps a part of the sequence");
  table.field("disable_loss_parallel", &ParallelismSettings::disable_loss_parallel,
              "with tensor parallelism: compute the loss from logits gathered chunk by chunk");
  table.field("enable_async_tensor_parallel", &ParallelismSettings::enable_async_tensor_parallel,
              "with tensor and sequence parallelism: products run while parts of their sequence are sent");
  table.field(
      "async_tensor_parallel_transport", &ParallelismSettings::async_tensor_parallel_transport,
      "how these parts are sent: through memory that the GPUs of an axis share over NVLink, by sends "
      "and receives, or (auto) the former where available, with whole products where a GPU is estimated "
      "to lose by parts",
      config::one_of({"auto", "symmetric_memory", "send_receive"}));
}

// TorchTitan reads the name without regard to case, and has two more for schedules in a file.
config::Constraint schedule_name() {
  std::vector<std::string> known = pipeline::schedule_names();
  known.insert(known.end(), {"PipelineScheduleSingle", "PipelineScheduleMulti"});
  config::Constraint names = config::one_of(known);
  names.accepts = [known](const config::Value& value) {
    const auto& name = std::get<std::string>(value);
    return std::any_of(known.begin(), known.end(), [&](const std::string& each) {
      return ::strcasecmp(each.c_str(), name.c_str()) == 0;
    });
  };
  return names;
}

void describe_pipeline_parallel(config::Table<ParallelismSettings>& table) {
  using Settings = ParallelismSettings;
  table.field("pipeline_parallel_degree", &Settings::pipeline_parallel_degree,
              "ranks that share the layers, each with one or several stages of them, or \"auto\": the plan's "
              "choice for the ranks of --nproc (docs/plan.md)",
              config::positive_or_auto());
  table.field("pipeline_parallel_schedule", &Settings::pipeline_parallel_schedule,
              "pipeline schedule; the last two names require a schedule file", schedule_name());
  table.field("pipeline_parallel_schedule_csv", &Settings::pipeline_parallel_schedule_csv,
              "a file with the schedule, a row for each rank; empty: the named schedule");
  table.field("pipeline_parallel_microbatch_size", &Settings::pipeline_parallel_microbatch_size,
              "sequences that travel together; a divisor of training.local_batch_size", config::at_least(1));
  table.field("pipeline_parallel_max_live_activations", &Settings::pipeline_parallel_max_live_activations,
              "forwards that may wait for their backward on a rank, counted per stage; a schedule with more "
              "is refused",
              config::at_least(1));
  table.field("pipeline_parallel_split", &Settings::pipeline_parallel_split,
              "layers divided evenly, or stages with equal computed times",
              config::one_of({"torchtitan", "balanced"}));
  table.field("pipeline_parallel_split_memory_gib", &Settings::pipeline_parallel_split_memory_gib,
              "with \"balanced\": limit on the memory of a rank's stages together, by computed sizes",
              config::above(0));
  table.field("pipeline_parallel_layers_per_stage", &Settings::pipeline_parallel_layers_per_stage,
              "determines the number of stages; unset: as few for each rank as the schedule allows",
              config::at_least(1));
  table.field("pipeline_parallel_first_stage_less_layers",
              &Settings::pipeline_parallel_first_stage_less_layers,
              "layers that the embedding counts for when layers are divided", config::at_least(0));
  table.field("pipeline_parallel_last_stage_less_layers", &Settings::pipeline_parallel_last_stage_less_layers,
              "layers that norm and head count for when layers are divided", config::at_least(0));
  table.field("module_fqns_per_model_part", &Settings::module_fqns_per_model_part,
              "the modules of each stage, instead of a split");
  table.refused("pipeline_parallel_expert_parallel_overlap", true,
                "there are no mixture-of-experts models yet", "expert_parallel_degree");
}

void refuse_expert_parallel(config::Table<ParallelismSettings>& table) {
  const char* experts = "there are no mixture-of-experts models yet";
  table.refused("expert_parallel_degree", int64_t{1}, experts);
  table.refused("expert_tensor_parallel_degree", int64_t{1}, experts);
  table.refused("expert_parallel_comm_backend", std::string("standard"), experts, "expert_parallel_degree",
                config::one_of({"standard", "deepep"}));
}

void check_factor(int64_t value, int64_t divisor, const std::string& key, const std::string& divisor_name,
                  std::vector<KeyedProblem>& problems) {
  if (value % divisor == 0) return;
  const int64_t below = value / divisor * divisor;
  problems.push_back({key, str("isn't a multiple of ", divisor_name, " = ", divisor, "; ",
                               below > 0 ? str(below, " or ") : "", below + divisor, " would do")});
}

// Whole heads go to each rank, so the degree divides both counts.
void check_heads(const ModelSizes& sizes, int tp, std::vector<KeyedProblem>& problems) {
  if (sizes.num_heads % tp == 0 && sizes.num_kv_heads % tp == 0) return;
  std::string degrees;
  for (int64_t degree = 1; degree <= sizes.num_kv_heads; ++degree)
    if (sizes.num_heads % degree == 0 && sizes.num_kv_heads % degree == 0)
      degrees += str(degrees.empty() ? "" : ", ", degree);
  problems.push_back({"parallelism.tensor_parallel_degree",
                      str("doesn't divide the model's ", sizes.num_heads, " heads and ", sizes.num_kv_heads,
                          " kv heads; degrees that do: ", degrees)});
}

}  // namespace

void describe(config::Table<ParallelismSettings>& table) {
  table.field("data_parallel_replicate_degree", &ParallelismSettings::data_parallel_replicate_degree,
              "copies of the sharded model: HSDP with shards, DDP with data_parallel_shard_degree = 1",
              config::at_least(1));
  table.field("data_parallel_shard_degree", &ParallelismSettings::data_parallel_shard_degree,
              "ranks that parameters are sharded over; -1: all that the other degrees leave",
              config::positive_or_minus_one());
  table.field("fsdp_reshard_after_forward", &ParallelismSettings::fsdp_reshard_after_forward,
              "whether gathered parameters are freed between forward and backward; an integer keeps them "
              "sharded over "
              "that many neighbors",
              reshard_name());
  table.field("fsdp_reduce_every_micro_batch", &ParallelismSettings::fsdp_reduce_every_micro_batch,
              "false: gradients stay whole until a step's last micro-batch (more memory, less "
              "communication), as they "
              "always do in a pipeline");
  table.field(
      "plan", &ParallelismSettings::plan,
      "registered function that parallelizes the model; empty: the model's own; see docs/extending.md");
  describe_tensor_parallel(table);
  table.include("context_parallel_", &ParallelismSettings::context);
  describe_pipeline_parallel(table);
  refuse_expert_parallel(table);
}

ParallelDims resolve_parallel_dims(const ParallelismSettings& settings, int world_size) {
  const auto degree = [](int64_t value) { return ParallelDims::product(value, 1); };
  ParallelDims dims{.dp_replicate = degree(settings.data_parallel_replicate_degree),
                    .dp_shard = degree(settings.data_parallel_shard_degree),
                    .rows = row_axes(chosen_parallelisms(settings)),
                    .sequence_parallel = settings.enable_sequence_parallel,
                    .tp = degree(settings.tensor_parallel_degree),
                    .pp = degree(settings.pipeline_parallel_degree)};
  if (dims.dp_shard != -1) return dims;
  dims.dp_shard = 1;
  dims.dp_shard = std::max(1, world_size / dims.world_size());
  return dims;
}

std::optional<std::string> world_size_problem(const ParallelDims& dims, int world_size) {
  if (dims.world_size() == world_size) return std::nullopt;
  std::string rows;
  for (const RowAxis& axis : dims.rows) rows += str(" x ", axis.name, " ", axis.degree);
  return str(
      "parallelism: dp_replicate ", dims.dp_replicate, " x dp_shard ", dims.dp_shard, rows, " x tp ", dims.tp,
      " x pp ", dims.pp, " = ", dims.world_size(), " ranks, but the job has ", world_size,
      "; change a degree (data_parallel_shard_degree = -1 takes what is left, if the others divide the "
      "ranks) or start ",
      dims.world_size(), " ranks (on one machine: titan train --nproc ", dims.world_size(), ")");
}

void check_sequence_length(const ParallelDims& dims, const std::string& key, int64_t seq_len,
                           std::vector<KeyedProblem>& problems) {
  std::string parts, degrees = "tensor_parallel_degree";
  int64_t num_parts = 1;
  for (const RowAxis& axis : dims.rows) {
    degrees += " x " + axis.degree_key;
    if (axis.degree == 1) continue;
    num_parts *= int64_t{axis.parts_per_rank} * axis.degree;
    parts += str(parts.empty() ? "" : " x ", axis.parts_per_rank > 1 ? str(axis.parts_per_rank, " x ") : "",
                 axis.degree_key);
  }
  if (num_parts > 1) check_factor(seq_len, num_parts, key, parts, problems);
  if (dims.tp > 1 && dims.sequence_parallel)
    check_factor(seq_len, int64_t{dims.tp} * dims.row_degree(), key, degrees, problems);
}

void check_divisibility(const ParallelDims& dims, const ModelSizes& sizes, int64_t seq_len,
                        std::vector<KeyedProblem>& problems) {
  check_sequence_length(dims, "training.seq_len", seq_len, problems);
  if (dims.tp > 1) check_heads(sizes, dims.tp, problems);
}

bool ParallelismSettings::has_auto_degree() const {
  return tensor_parallel_degree == 0 || context.degree == 0 || pipeline_parallel_degree == 0;
}

const void* ParallelismSettings::settings_of(const std::string& name) const {
  if (name == "context") return &context;
  const auto* all = static_cast<const ParallelismArgs*>(args.settings.get());
  if (!all) return nullptr;
  const auto found = all->find(name);
  return found == all->end() ? nullptr : found->second.get();
}

void ParallelismSettings::set_degree(const std::string& name, int64_t degree) {
  if (name == "context") {
    context.degree = degree;
    return;
  }
  const ParallelismSpec& spec = *parallelisms().get(name);
  const auto* all = static_cast<const ParallelismArgs*>(args.settings.get());
  const auto copy = all ? std::make_shared<ParallelismArgs>(*all) : std::make_shared<ParallelismArgs>();
  std::shared_ptr<void>& own = (*copy)[name];
  own = own ? spec.copy_settings(own.get()) : spec.make_settings();
  spec.set_degree(own.get(), degree);
  args.settings = copy;
}

std::vector<Parallelism> chosen_parallelisms(const ParallelismSettings& settings) {
  std::vector<Parallelism> chosen;
  for (const std::string& name : parallelisms().names())
    chosen.push_back(parallelisms().get(name)->choose(settings.settings_of(name)));
  return chosen;
}

OverlapTransport overlap_transport(const ParallelismSettings& settings) {
  const std::string& name = settings.async_tensor_parallel_transport;
  if (name == "symmetric_memory") return OverlapTransport::SymmetricMemory;
  return name == "send_receive" ? OverlapTransport::SendReceive : OverlapTransport::Auto;
}

ReshardAfterForward reshard_policy(const std::string& name) {
  if (name == "default") return {};
  if (name == "always") return ReshardAfterForward::always();
  if (name == "never") return ReshardAfterForward::never();
  if (is_count(name)) return ReshardAfterForward::to_size(std::stoi(name));
  throw ConfigError(
      str("fsdp_reshard_after_forward = \"", name, "\": expected default, always, never or an integer"));
}

namespace {

// "op", or a number n for every n-th layer.
config::Constraint op_or_count() {
  return {"\"op\" or an integer >= 1 in quotes",
          [](const config::Value& value) {
            const auto& text = std::get<std::string>(value);
            return text == "op" || (is_count(text) && std::stoll(text) > 0);
          },
          {"op"}};
}

std::optional<LayersPolicy> policy_of(const ActivationCheckpointSettings& settings,
                                      std::shared_ptr<dist::Group> group) {
  if (settings.mode == "none") return std::nullopt;
  if (settings.mode == "full") return FullRecompute{};
  if (settings.mode == "offload") return OffloadActivations{};
  const SelectiveOp by_op{.recompute_products = settings.per_op_sac_force_recompute_mm_shapes_by_fqns};
  if (settings.mode == "selective" && settings.selective_ac_option == "op") return by_op;
  if (settings.mode == "selective") return SelectiveLayers{.n = std::stoll(settings.selective_ac_option)};
  TITAN_CHECK(settings.mode == "memory_budget", "activation_checkpoint.mode '", settings.mode, "'");
  return MemoryBudget{.bytes = settings.memory_budget_bytes.value_or(-1),
                      .fraction = settings.memory_budget,
                      .group = std::move(group),
                      .op = by_op};
}

}  // namespace

void describe(config::Table<ActivationCheckpointSettings>& table) {
  using Settings = ActivationCheckpointSettings;
  table.field(
      "mode", &Settings::mode,
      "what layers do with their activations between forward and backward: keep them, compute them again "
      "(all or a selection), move them to the host (GPUs only), or keep as many as fit into a budget",
      config::one_of({"none", "full", "selective", "offload", "memory_budget"}));
  table.field("selective_ac_option", &Settings::selective_ac_option,
              "with mode \"selective\": \"op\" keeps attention, reduce-scatters and every second product of "
              "each layer; a number n recomputes every n-th layer in full",
              op_or_count());
  table.field(
      "per_op_sac_force_recompute_mm_shapes_by_fqns", &Settings::per_op_sac_force_recompute_mm_shapes_by_fqns,
      "with \"op\": linear modules whose name contains one of these are computed again and not counted");
  table.field("early_stop", &Settings::early_stop,
              "a recomputation ends with the last tensor that the backward needs");
  table.field("preserve_rng_state", &Settings::preserve_rng_state,
              "a recomputation draws the random numbers that the forward drew");
  table.field("determinism_check", &Settings::determinism_check,
              "compare shapes and dtypes of recomputed tensors with the forward's",
              config::one_of({"default", "none"}));
  table.field("memory_budget", &Settings::memory_budget,
              "with mode \"memory_budget\": bytes that layers may keep, on a scale from full recomputation "
              "(0) to none (1)",
              config::in_range(0, 1));
  table.field("memory_budget_bytes", &Settings::memory_budget_bytes,
              "the same in bytes per rank, for one forward or for all that a pipeline's schedule has in "
              "flight; overrides memory_budget",
              config::at_least(0));
  table.refused("visualize_memory_budget_pareto", false,
                "the choice under a memory budget is printed as a table");
  table.refused(
      "debug", false,
      "there is no trace of operations to compare: a recomputation that differs names the module and "
      "the tensor");
}

ActivationCheckpoint activation_checkpoint(const ActivationCheckpointSettings& settings,
                                           std::shared_ptr<dist::Group> group) {
  return {.policy = policy_of(settings, std::move(group)),
          .options = {.early_stop = settings.early_stop,
                      .preserve_rng_state = settings.preserve_rng_state,
                      .check_recompute = settings.determinism_check != "none"}};
}

}  // namespace titan::train

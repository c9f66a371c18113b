#include "job/parallelism_settings.h"

#include <strings.h>
#include <algorithm>

#include "titan/core/error.h"
#include "titan/parallel/pipeline_schedule.h"
#include "titan/train/model_spec.h"

namespace titan::train {

void describe_pipeline_parallel(config::Table<ParallelismSettings>& table);

namespace {

bool is_count(const std::string& text) {
  return !text.empty() && text.size() < 9 && text.find_first_not_of("0123456789") == std::string::npos;
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
              "ranks that share each layer's products", config::at_least(1));
  table.field("enable_sequence_parallel", &ParallelismSettings::enable_sequence_parallel,
              "with tensor parallelism: between the products each rank keeps a part of the sequence");
  table.field("disable_loss_parallel", &ParallelismSettings::disable_loss_parallel,
              "with tensor parallelism: compute the loss from logits gathered chunk by chunk");
  table.field("enable_async_tensor_parallel", &ParallelismSettings::enable_async_tensor_parallel,
              "with tensor and sequence parallelism: products run while parts of their sequence travel");
  table.field(
      "async_tensor_parallel_transport", &ParallelismSettings::async_tensor_parallel_transport,
      "how these parts travel: through memory that the GPUs of an axis share over NVLink, by sends and "
      "receives, or the former where it can be",
      config::one_of({"auto", "symmetric_memory", "send_receive"}));
}

void refuse_expert_parallel(config::Table<ParallelismSettings>& table) {
  const char* experts = "there are no mixture-of-experts models yet";
  table.refused("expert_parallel_degree", int64_t{1}, experts);
  table.refused("expert_tensor_parallel_degree", int64_t{1}, experts);
  table.refused("expert_parallel_comm_backend", std::string("standard"), experts, "expert_parallel_degree",
                config::one_of({"standard", "deepep"}));
}

std::string product_of(const ParallelDims& dims) {
  std::string rows;
  for (const RowAxis& axis : dims.rows) rows += str(" x ", axis.name, " ", axis.degree);
  return str("dp_replicate ", dims.dp_replicate, " x dp_shard ", dims.dp_shard, rows, " x tp ", dims.tp,
             " x pp ", dims.pp);
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
              "that many neighbours",
              reshard_name());
  table.field("fsdp_reduce_every_micro_batch", &ParallelismSettings::fsdp_reduce_every_micro_batch,
              "false: gradients stay whole until a step's last micro-batch (more memory, less "
              "communication), as they "
              "always do in a pipeline");
  table.field(
      "plan", &ParallelismSettings::plan,
      "registered function that spreads the model out; empty: the model's own; see docs/extending.md");
  describe_tensor_parallel(table);
  table.include("context_parallel_", &ParallelismSettings::context);
  describe_pipeline_parallel(table);
  refuse_expert_parallel(table);
}

ParallelDims resolve_parallel_dims(const ParallelismSettings& settings, int world_size,
                                   std::vector<std::string>& problems) {
  ParallelDims dims;
  dims.dp_replicate = static_cast<int>(settings.data_parallel_replicate_degree);
  dims.dp_shard = static_cast<int>(settings.data_parallel_shard_degree);
  dims.rows = row_axes(chosen_parallelisms(settings));
  dims.tp = static_cast<int>(settings.tensor_parallel_degree);
  dims.sequence_parallel = settings.enable_sequence_parallel;
  dims.pp = static_cast<int>(settings.pipeline_parallel_degree);
  if (dims.dp_shard == -1) {
    int others = dims.dp_replicate * dims.row_degree() * dims.tp * dims.pp;
    dims.dp_shard = std::max(1, world_size / others);
  }
  if (dims.world_size() != world_size)
    problems.push_back(str("parallelism: ", product_of(dims), " = ", dims.world_size(),
                           " ranks, but the job has ", world_size,
                           "; change a degree (data_parallel_shard_degree = -1 takes what is left) or start ",
                           dims.world_size(), " ranks"));
  return dims;
}

void check_sequence_length(const ParallelDims& dims, const std::string& key, int64_t seq_len,
                           std::vector<KeyedProblem>& problems) {
  std::string parts, degrees = "tensor_parallel_degree";
  int64_t num_parts = 1;
  for (const RowAxis& axis : dims.rows) {
    degrees += " x " + axis.degree_key;
    if (axis.degree == 1) continue;
    num_parts *= axis.parts_per_rank * axis.degree;
    parts += str(parts.empty() ? "" : " x ", axis.parts_per_rank > 1 ? str(axis.parts_per_rank, " x ") : "",
                 axis.degree_key);
  }
  if (num_parts > 1) check_factor(seq_len, num_parts, key, parts, problems);
  if (dims.tp > 1 && dims.sequence_parallel)
    check_factor(seq_len, dims.tp * dims.row_degree(), key, degrees, problems);
}

void check_divisibility(const ParallelDims& dims, const ModelSizes& sizes, int64_t seq_len,
                        std::vector<KeyedProblem>& problems) {
  check_sequence_length(dims, "training.seq_len", seq_len, problems);
  if (dims.tp > 1) check_heads(sizes, dims.tp, problems);
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

}  // namespace

void describe_pipeline_parallel(config::Table<ParallelismSettings>& table) {
  using Settings = ParallelismSettings;
  table.field("pipeline_parallel_degree", &Settings::pipeline_parallel_degree,
              "ranks that share the layers, each with one or several stages of them", config::at_least(1));
  table.field("pipeline_parallel_schedule", &Settings::pipeline_parallel_schedule,
              "who computes when; the last two names go with a file", schedule_name());
  table.field("pipeline_parallel_schedule_csv", &Settings::pipeline_parallel_schedule_csv,
              "a file with the schedule, a row for each rank; empty: made by its name");
  table.field("pipeline_parallel_microbatch_size", &Settings::pipeline_parallel_microbatch_size,
              "sequences that travel together; a divisor of training.local_batch_size", config::at_least(1));
  table.field(
      "pipeline_parallel_max_live_activations", &Settings::pipeline_parallel_max_live_activations,
      "forwards that a rank may hold for their backward, counted per stage; a schedule that holds more "
      "is refused",
      config::at_least(1));
  table.field("pipeline_parallel_split", &Settings::pipeline_parallel_split,
              "layers dealt evenly, or stages that take the same time by computed costs",
              config::one_of({"torchtitan", "balanced"}));
  table.field("pipeline_parallel_split_memory_gib", &Settings::pipeline_parallel_split_memory_gib,
              "with \"balanced\": what the stages of a rank may take together, by computed sizes",
              config::above(0));
  table.field("pipeline_parallel_layers_per_stage", &Settings::pipeline_parallel_layers_per_stage,
              "gives the number of stages; unset: as few for each rank as the schedule takes",
              config::at_least(1));
  table.field("pipeline_parallel_first_stage_less_layers",
              &Settings::pipeline_parallel_first_stage_less_layers,
              "how many layers the embedding counts for where they are dealt", config::at_least(0));
  table.field("pipeline_parallel_last_stage_less_layers", &Settings::pipeline_parallel_last_stage_less_layers,
              "how many layers norm and head count for where they are dealt", config::at_least(0));
  table.field("module_fqns_per_model_part", &Settings::module_fqns_per_model_part,
              "the modules of each stage, in place of a split");
  table.refused("pipeline_parallel_expert_parallel_overlap", true,
                "there are no mixture-of-experts models yet", "expert_parallel_degree");
}

namespace {

// Every so many layers, or "op".
config::Constraint op_or_count() {
  return {"\"op\" or an integer >= 1 in quotes",
          [](const config::Value& value) {
            const auto& text = std::get<std::string>(value);
            const bool digits = !text.empty() && text.size() < 10 &&
                                text.find_first_not_of("0123456789") == std::string::npos;
            return text == "op" || (digits && text.find_first_not_of('0') != std::string::npos);
          },
          {"op"}};
}

LayersPolicy selective(const ActivationCheckpointSettings& settings) {
  if (settings.selective_ac_option == "op")
    return SelectiveOp{.recompute_products = settings.per_op_sac_force_recompute_mm_shapes_by_fqns};
  return SelectiveLayers{.n = std::stoll(settings.selective_ac_option)};
}

std::optional<LayersPolicy> policy_of(const ActivationCheckpointSettings& settings,
                                      std::shared_ptr<dist::Group> group) {
  if (settings.mode == "none") return std::nullopt;
  if (settings.mode == "full") return FullRecompute{};
  if (settings.mode == "selective") return selective(settings);
  if (settings.mode == "offload") return OffloadActivations{};
  TITAN_CHECK(settings.mode == "memory_budget", "activation_checkpoint.mode '", settings.mode, "'");
  return MemoryBudget{.bytes = settings.memory_budget_bytes.value_or(-1),
                      .fraction = settings.memory_budget,
                      .group = std::move(group),
                      .op = {.recompute_products = settings.per_op_sac_force_recompute_mm_shapes_by_fqns}};
}

}  // namespace

void describe(config::Table<ActivationCheckpointSettings>& table) {
  using Settings = ActivationCheckpointSettings;
  table.field("mode", &Settings::mode,
              "what layers do with their activations between forward and backward: keep them, compute them "
              "again (all or a selection), move them to the host (GPUs only), or what fits into a budget",
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
              "compare shapes and dtypes of what is computed again with the forward's",
              config::one_of({"default", "none"}));
  table.field(
      "memory_budget", &Settings::memory_budget,
      "with mode \"memory_budget\": bytes that layers may keep, on the way from full recomputation (0) "
      "to none (1)",
      config::in_range(0, 1));
  table.field(
      "memory_budget_bytes", &Settings::memory_budget_bytes,
      "the same in bytes of a rank: for one forward, or for all that a pipeline's schedule has under way "
      "at a time; overrides memory_budget",
      config::at_least(0));
  table.refused("visualize_memory_budget_pareto", false,
                "the choice that a memory budget leads to is printed as a table");
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

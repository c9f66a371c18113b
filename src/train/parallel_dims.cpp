// The keys of [parallelism] about pipelines.

#include "titan/train/parallel_dims.h"

#include <strings.h>
#include <algorithm>

#include "titan/core/error.h"
#include "titan/parallel/pipeline_schedule.h"
#include "titan/train/model_spec.h"

namespace titan::train {

void describe_pipeline_parallel(config::Table<ParallelismSettings>& table);

namespace {

bool is_number(const std::string& text) {
  return !text.empty() && text.size() < 9 && text.find_first_not_of("0123456789") == std::string::npos;
}

config::Constraint reshard_name() {
  return {"\"default\", \"always\", \"never\" or an integer >= 1 in quotes",
          [](const config::Value& value) {
            const auto& name = std::get<std::string>(value);
            return name == "default" || name == "always" || name == "never" ||
                   (is_number(name) && std::stoi(name) > 0);
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
  dims.rows = row_axes(settings);
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
  std::string names;
  for (const RowAxis& axis : dims.rows) {
    names += " x " + axis.degree_key;
    if (axis.degree == 1) continue;
    const int parts = axis.parts_per_rank;
    check_factor(seq_len, parts * axis.degree, key, str(parts > 1 ? str(parts, " x ") : "", axis.degree_key),
                 problems);
  }
  if (dims.tp > 1 && dims.sequence_parallel)
    check_factor(seq_len, dims.tp * dims.row_degree(), key, "tensor_parallel_degree" + names, problems);
}

void check_divisibility(const ParallelDims& dims, const ModelSizes& sizes, int64_t seq_len,
                        std::vector<KeyedProblem>& problems) {
  check_sequence_length(dims, "training.seq_len", seq_len, problems);
  if (dims.tp > 1) check_heads(sizes, dims.tp, problems);
}

int Meshes::dp_rank() const { return batch.rank(); }
int Meshes::dp_degree() const { return batch.size(); }

const void* ParallelismSettings::settings_of(const std::string& name) const {
  if (name == "context") return &context;
  const auto found = args->find(name);
  return found == args->end() ? nullptr : found->second.get();
}

std::vector<Parallelism> chosen_parallelisms(const ParallelismSettings& settings) {
  std::vector<Parallelism> chosen;
  for (const std::string& name : parallelisms().names()) {
    const ParallelismSpec& spec = *parallelisms().get(name);
    const void* its = settings.settings_of(name);
    chosen.push_back(its ? spec.choose(its) : spec.choose(spec.make_settings().get()));
  }
  return chosen;
}

std::vector<RowAxis> row_axes(const ParallelismSettings& settings) {
  std::vector<RowAxis> axes;
  for (const Parallelism& each : chosen_parallelisms(settings))
    if (each.axis.degree > 1 || parallelisms().get(each.kind)->always_in_mesh()) axes.push_back(each.axis);
  return axes;
}

namespace {

// Those of the dims, and with one rank each those that every mesh has.
std::vector<RowAxis> mesh_rows(const ParallelDims& dims) {
  std::vector<RowAxis> rows = dims.rows;
  for (const RowAxis& axis : row_axes({}))
    if (std::none_of(rows.begin(), rows.end(), [&](const RowAxis& row) { return row.name == axis.name; }))
      rows.insert(rows.begin(), axis);
  return rows;
}

std::vector<std::string> joined(std::vector<std::string> names, const std::vector<std::string>& more) {
  names.insert(names.end(), more.begin(), more.end());
  return names;
}

}  // namespace

Meshes build_meshes(const dist::World& world, const ParallelDims& dims) {
  std::vector<MeshAxis> axes = {
      {"pp", dims.pp}, {"dp_replicate", dims.dp_replicate}, {"dp_shard", dims.dp_shard}};
  std::vector<std::string> rows;
  for (const RowAxis& axis : mesh_rows(dims)) {
    axes.push_back({axis.name, axis.degree});
    rows.push_back(axis.name);
  }
  axes.push_back({"tp", dims.tp});
  Meshes meshes;
  meshes.world = DeviceMesh::create(world, axes);
  meshes.pp = meshes.world["pp"];
  meshes.stage = meshes.world.flatten(joined(joined({"dp_replicate", "dp_shard"}, rows), {"tp"}), "stage");
  std::string shard = "dp_shard";
  if (dims.row_degree() > 1) {
    shard = "fsdp";
    meshes.world.flatten(joined({"dp_shard"}, rows), shard);
  }
  meshes.fsdp = dims.dp_replicate > 1 ? meshes.world({"dp_replicate", shard}) : meshes.world[shard];
  meshes.batch = meshes.world.flatten({"dp_replicate", "dp_shard"}, "batch");
  meshes.rows = rows.size() == 1 ? meshes.world[rows[0]] : meshes.world.flatten(rows, "rows");
  meshes.tp = meshes.world["tp"];
  meshes.loss = meshes.world.flatten(joined({"pp", "dp_replicate", "dp_shard"}, rows), "loss");
  return meshes;
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
  if (is_number(name)) return ReshardAfterForward::to_size(std::stoi(name));
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

}  // namespace titan::train

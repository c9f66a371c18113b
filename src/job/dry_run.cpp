#include "job/dry_run.h"

#include <algorithm>
#include <map>
#include <set>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "core/units.h"
#include "titan/core/error.h"
#include "titan/parallel/parameters.h"

namespace titan::train {

DryRun::DryRun(const JobConfig& config, int world_size, int rank)
    : config_(config),
      world_(dist::init({.backend = "fake", .fake_rank = rank, .fake_world_size = world_size})),
      meshes_(build_job_meshes(config, world_)),
      plan_(plan_stages(config)),
      stages_(plan_.stages_of(meshes_.pp.rank())),
      models_(build_stages(config, plan_, meshes_, at::kMeta)) {}

int64_t DryRun::micro_batch_rows() const {
  return plan_.num_stages() == 1 ? config_.training.local_batch_size
                                 : config_.parallelism.pipeline_parallel_microbatch_size;
}

int64_t DryRun::num_micro_batches() const {
  const TrainingSettings& training = config_.training;
  return training.batches_per_step(meshes_.dp_degree()) * (training.local_batch_size / micro_batch_rows());
}

void DryRun::run_micro_batch() {
  if (boundaries_.empty())
    boundaries_ = stage_boundaries(config_, plan_, world_, micro_batch_rows(), config_.training.seq_len);
  for (size_t i = 0; i < stages_.size(); ++i) {
    const TensorType& type = boundaries_[static_cast<size_t>(stages_[i])];
    at::Tensor input = at::empty(type.sizes, at::TensorOptions(at::kMeta).dtype(type.dtype));
    if (input.is_floating_point()) input.requires_grad_();
    run_stage(i, input);
  }
}

void DryRun::run_stage(size_t i, const at::Tensor& input) {
  if (stages_[i] + 1 < plan_.num_stages()) {
    const at::Tensor hidden = models_[i]->hidden(input);
    return hidden.backward(at::empty_like(hidden));
  }
  const at::Tensor labels_BS = at::empty({micro_batch_rows(), config_.training.seq_len},
                                         at::TensorOptions(at::kMeta).dtype(at::kLong));
  models_[i]->loss(input, labels_BS, labels_BS.numel() * meshes_.dp_degree()).backward();
}

void build_each_stage(const JobConfig& config, int world_size) {
  const auto depth = static_cast<int>(config.parallelism.pipeline_parallel_degree);
  for (int stage = 0; stage < depth; ++stage)
    const DryRun built(config, world_size, stage * (world_size / depth));
}

int smallest_world(const ParallelismSettings& settings) {
  return resolve_parallel_dims(settings, /*world_size=*/1).world_size();
}

// ---- the table of `titan train --print-plan`

namespace {

bool is_number(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
}

// "layers.7.attention" is layer 7 of {"layers.", ".attention"}.
struct LayerName {
  std::string before, after;
  int64_t layer = -1;  ///< -1: the name has no number
};

LayerName parse(const std::string& name) {
  for (size_t begin = 0; begin < name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    const std::string component = name.substr(begin, end - begin);
    if (is_number(component)) return {name.substr(0, begin), name.substr(end), std::stoll(component)};
    begin = end + 1;
  }
  return {name.empty() ? "(root)" : name, "", -1};
}

// Layers with equal rows.
struct Group {
  LayerName name;
  PlanRow row;
  std::vector<int64_t> layers;
};

std::string numbers(const std::vector<int64_t>& layers) {
  std::string text;
  for (size_t begin = 0; begin < layers.size();) {
    size_t end = begin + 1;
    while (end < layers.size() && layers[end] == layers[end - 1] + 1) ++end;
    text += str(begin == 0 ? "" : ",", layers[begin]);
    if (end - begin > 1) text += str("..", layers[end - 1]);
    begin = end;
  }
  return text;
}

std::vector<Group> grouped(const std::vector<PlanRow>& rows) {
  std::vector<Group> groups;
  std::map<std::vector<std::string>, size_t> known;
  for (const PlanRow& row : rows) {
    const LayerName name = parse(row.module);
    const std::vector<std::string> key = {name.before,   name.after,     row.style,
                                          row.weight,    row.activation, row.collectives,
                                          row.transport, str(row.bytes), str(row.gradient_bytes)};
    const auto [found, is_new] = known.try_emplace(key, groups.size());
    if (is_new) groups.push_back({name, row, {}});
    groups[found->second].layers.push_back(name.layer);
  }
  return groups;
}

// Counts of the transfers of activations and gradients in a step.
struct Times {
  int64_t micro_batches = 1;
  int64_t reductions = 1;
};

Times times_of(const JobConfig& config, const DryRun& run) {
  const bool each = config.parallelism.fsdp_reduce_every_micro_batch && run.meshes().pp.size() == 1;
  return {run.num_micro_batches(), each ? run.num_micro_batches() : 1};
}

int64_t bytes_of(const Group& group, const Times& times) {
  const auto count = static_cast<int64_t>(group.layers.size());
  return count * (group.row.bytes * times.micro_batches + group.row.gradient_bytes * times.reductions);
}

std::vector<std::string> cells_of(const Group& group, const Times& times) {
  const std::string layers = group.name.layer < 0 ? "" : numbers(group.layers);
  return {group.name.before + layers + group.name.after,
          group.row.style,
          group.row.weight,
          group.row.activation,
          group.row.collectives,
          str(bytes_of(group, times))};
}

std::string heading(const JobConfig& config, DryRun& run, int world_size) {
  const DeviceMesh& mesh = run.meshes().world;
  std::string degrees;
  for (const MeshAxis& axis : mesh.axes()) {
    if (axis.size == 1) continue;
    degrees += str(degrees.empty() ? ": " : ", ", axis.name, " ", axis.size);
  }
  int64_t mine = 0;
  for (const auto& model : run.models())
    for (const Parameter& parameter : parameters(model->root())) mine += parameter.data.local.numel();
  return str(config.model_title(), " on ", world_size, " rank(s)", degrees, "\nrank 0 keeps ", mine, " of ",
             config.spec().sizes(config.args()).num_params,
             " parameters; its part of a step: ", run.num_micro_batches(), " micro-batch(es) of ",
             run.micro_batch_rows(), " x ", config.training.seq_len, " tokens\n\n");
}

// A stage's parameters, before they are sharded.
int64_t num_parameters(const JobConfig& config, const std::vector<std::string>& modules) {
  const auto stage =
      config.spec().build(config.args(), {.construct = deferred(at::kMeta), .stage_modules = modules});
  int64_t count = 0;
  for (const Parameter& parameter : parameters(stage->root())) count += parameter.compute.numel();
  return count;
}

std::string stages_table(const JobConfig& config, const StagePlan& plan, int world_size) {
  if (plan.num_stages() == 1) return "";
  TextTable table{{{"stage", "pp rank", "modules", "parameters"}}, {false, false, false, true}};
  for (int stage = 0; stage < plan.num_stages(); ++stage) {
    const auto& modules = plan.modules[static_cast<size_t>(stage)];
    table.rows.push_back({str(stage), str(plan.rank_of_stage[static_cast<size_t>(stage)]),
                          pipeline::short_list(modules), str(num_parameters(config, modules))});
  }
  std::string text = to_string(table);
  for (const StageSharedParameter& shared : plan.shared)
    text += str(shared.name, " is on the stages ", c10::Join(", ", shared.stages), "\n");
  const ParallelDims dims = resolve_parallel_dims(config.parallelism, world_size);
  return text + str("the first rank with the loss is ", metrics_rank(dims, plan), "\n\n");
}

// LibTorch can't run some operations of a user's model, or their gradients, on meta tensors: then there are
// no bytes to count. Returns its error; "" if the step ran.
std::string run_or_explain(DryRun& run) {
  try {
    run.run_micro_batch();
    return "";
  } catch (const c10::NotImplementedError& error) {
    const std::string message = reason_of(error);
    return message.substr(0, std::min(message.find(". "), message.find('\n')));
  }
}

std::vector<PlanRow> rows_of(const DryRun& run) {
  std::vector<PlanRow> rows;
  for (const auto& model : run.models())
    for (PlanRow& row : plan_rows(model->root())) rows.push_back(std::move(row));
  return rows;
}

// The transports of exchanges inside products: "in products: sent and received".
std::string transports_of(const std::vector<PlanRow>& rows) {
  std::set<std::string> transports;
  for (const PlanRow& row : rows)
    if (!row.transport.empty()) transports.insert(row.transport);
  std::string text;
  for (const std::string& transport : transports) text += str("\nin products: ", transport, "\n");
  return text;
}

}  // namespace

std::string plan_table(const JobConfig& config, int world_size) {
  DryRun run(config, world_size);
  std::string text = heading(config, run, world_size) + stages_table(config, run.plan(), world_size);
  if (run.meshes().tp.size() == 1)
    return text + "no tensor parallelism (parallelism.tensor_parallel_degree = 1): every module is whole\n";
  const std::string problem = run_or_explain(run);
  TextTable table{{{"module", "style", "weights", "input and output", "forward / backward", "bytes/step"}},
                  {false, false, false, false, false, true}};
  int64_t total = 0;
  const Times times = times_of(config, run);
  const std::vector<PlanRow> rows = rows_of(run);
  for (const Group& group : grouped(rows)) {
    table.rows.push_back(cells_of(group, times));
    total += bytes_of(group, times);
    if (!problem.empty()) table.rows.back().back() = "?";
  }
  table.rows.push_back({"all", "", "", "", "", problem.empty() ? str(total) : "?"});
  text += to_string(table) + transports_of(rows);
  return problem.empty() ? text : str(text, "\nThe step can't be run without data: ", problem, "\n");
}

}  // namespace titan::train

#include "job/pipeline/stages.h"

#include <algorithm>
#include <sstream>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "job/build.h"
#include "job/float8_job.h"
#include "titan/core/error.h"
#include "titan/parallel/pipeline_schedule.h"

namespace titan::train {

std::vector<int> StagePlan::stages_of(int pp_rank) const {
  std::vector<int> stages;
  for (int stage = 0; stage < num_stages(); ++stage)
    if (rank_of_stage[static_cast<size_t>(stage)] == pp_rank) stages.push_back(stage);
  return stages;
}

int metrics_rank(const ParallelDims& dims, const StagePlan& plan) {
  return plan.rank_of_stage.back() * (dims.world_size() / dims.pp);
}

std::vector<std::unique_ptr<TrainableModel>> build_stages(const JobConfig& config, const StagePlan& plan,
                                                          const Meshes& meshes, at::Device device) {
  if (!device.is_meta() && meshes.world.rank() == 0) log_float8_layers(config);
  std::vector<std::unique_ptr<TrainableModel>> stages;
  for (const int stage : plan.stages_of(meshes.pp.rank()))
    stages.push_back(build_model(config, meshes, device, plan.modules[static_cast<size_t>(stage)]));
  return stages;
}

std::vector<TensorType> stage_boundaries(const JobConfig& config, const StagePlan& plan,
                                         const dist::World& world, int64_t rows, int64_t seq_len) {
  at::NoGradGuard no_grad;
  at::Tensor input = at::empty({rows, seq_len}, at::TensorOptions(at::kMeta).dtype(at::kLong));
  std::vector<TensorType> boundaries = {{input.sizes().vec(), input.scalar_type()}};
  if (plan.num_stages() == 1) return boundaries;
  const dist::World played =
      dist::init({.backend = "fake", .fake_rank = world.rank(), .fake_world_size = world.size()});
  const Meshes meshes = build_job_meshes(config, played);
  for (size_t stage = 0; stage + 1 < plan.modules.size(); ++stage) {
    input = build_model(config, meshes, at::kMeta, plan.modules[stage])->hidden(input);
    boundaries.push_back({input.sizes().vec(), input.scalar_type()});
  }
  return boundaries;
}

namespace {

using pipeline::Schedule;

// A schedule whose memory grows with the micro-batches runs one batch at a time.
Schedule named_schedule(const std::string& name, const StagePlan& plan, int num_ranks, int64_t num_batches,
                        int per_batch) {
  const auto& traits = pipeline::schedule_traits(name);
  const int at_once = traits.memory_grows ? per_batch : per_batch * static_cast<int>(num_batches);
  const Schedule schedule = pipeline::make_schedule(name, num_ranks, plan.num_stages(), at_once);
  return traits.memory_grows ? pipeline::repeat(schedule, static_cast<int>(num_batches)) : schedule;
}

Schedule training_schedule(const JobConfig& config, const StagePlan& plan, int num_ranks,
                           int64_t num_batches) {
  const ParallelismSettings& settings = config.parallelism;
  const auto per_batch =
      static_cast<int>(config.training.local_batch_size / settings.pipeline_parallel_microbatch_size);
  const auto file = schedule_from_file(settings);
  // A file's micro-batches are those of one batch (check_pipeline).
  const Schedule schedule =
      file ? pipeline::repeat(*file, static_cast<int>(num_batches))
           : named_schedule(settings.pipeline_parallel_schedule, plan, num_ranks, num_batches, per_batch);
  const Schedule complete = pipeline::with_parameter_actions(pipeline::with_communication(schedule));
  pipeline::check_schedule(complete);
  return complete;
}

Schedule validation_schedule(const StagePlan& plan, int num_micro_batches) {
  return pipeline::with_parameter_actions(pipeline::with_communication(
      pipeline::make_forward_only_schedule(plan.rank_of_stage, num_micro_batches)));
}

int peak_live(const Schedule& schedule, int pp_rank) {
  return std::max(1, pipeline::simulate(schedule).ranks.at(static_cast<size_t>(pp_rank)).peak_live);
}

}  // namespace

int most_under_way(const JobConfig& config, const StagePlan& plan, int num_ranks, int pp_rank) {
  if (plan.num_stages() == 1) return 1;
  return peak_live(training_schedule(config, plan, num_ranks, /*num_batches=*/1), pp_rank);
}

// A layer's policy knows of one forward, on whichever stage of the rank it is.
void share_memory_budget(ActivationCheckpointSettings& settings, const Schedule& schedule, int pp_rank) {
  auto& bytes = settings.memory_budget_bytes;
  if (!bytes) return;
  *bytes /= peak_live(schedule, pp_rank);
}

BuiltModels build_pipeline(const JobConfig& config, const Meshes& meshes, at::Device device,
                           int64_t num_batches) {
  const StagePlan plan = plan_stages(config);
  const Schedule schedule = training_schedule(config, plan, meshes.pp.size(), num_batches);
  JobConfig of_rank = config;
  share_memory_budget(of_rank.activation_checkpoint, schedule, meshes.pp.rank());
  BuiltModels built;
  built.models = build_stages(of_rank, plan, meshes, device);
  std::vector<Stage> stages;
  const std::vector<int> indices = plan.stages_of(meshes.pp.rank());
  for (size_t i = 0; i < indices.size(); ++i) {
    stages.push_back({built.models[i].get(), indices[i]});
    for (Parameter& parameter : parameters(built.models[i]->root()))
      built.parameters.push_back(std::move(parameter));
  }
  const int64_t rows = config.parallelism.pipeline_parallel_microbatch_size;
  const auto parts_of = [&](const Schedule& of, int64_t seq_len) {
    return ScheduleParts{of, stage_boundaries(config, plan, meshes.world.world(), rows, seq_len)};
  };
  const ScheduleParts training = parts_of(schedule, config.training.seq_len);
  std::optional<ScheduleParts> evaluation;
  if (const auto& validation = config.validation; validation.enable)
    evaluation = parts_of(validation_schedule(plan, static_cast<int>(validation.local_batch_size / rows)),
                          validation.seq_len);
  TiedGradients tied(built.parameters, meshes.pp);
  auto runner = std::make_unique<PipelineRunner>(std::move(stages), meshes.pp, device);
  runner->set_schedules(training, evaluation, rows, std::move(tied));
  built.runner = std::move(runner);
  return built;
}

std::vector<std::string> names_elsewhere(const std::vector<Parameter>& parameters, const Meshes& meshes) {
  if (meshes.pp.size() == 1) return {};
  std::string own;
  for (const Parameter& parameter : parameters) own += parameter.name + "\n";
  std::vector<std::string> names;
  for (const std::string& text : meshes.pp.group()->all_gather_text(own, {"train::parameter_names"})) {
    std::istringstream lines(text);
    for (std::string name; std::getline(lines, name);) names.push_back(name);
  }
  return names;
}

}  // namespace titan::train

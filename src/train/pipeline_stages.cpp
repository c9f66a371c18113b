#include "titan/train/pipeline_stages.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "titan/train/build.h"
#include "train/float8_job.h"

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

}  // namespace titan::train

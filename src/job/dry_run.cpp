#include "job/dry_run.h"

#include <algorithm>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "job/build.h"

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
  const int64_t rows = training.local_batch_size * meshes_.dp_degree();
  const int64_t batches = training.global_batch_size < 0 ? 1 : (training.global_batch_size + rows - 1) / rows;
  return batches * (training.local_batch_size / micro_batch_rows());
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

int smallest_world(const ParallelismSettings& settings) {
  const int64_t shard = std::max<int64_t>(settings.data_parallel_shard_degree, 1);
  return static_cast<int>(settings.pipeline_parallel_degree * settings.data_parallel_replicate_degree *
                          shard * ParallelDims{.rows = row_axes(chosen_parallelisms(settings))}.row_degree() *
                          settings.tensor_parallel_degree);
}

}  // namespace titan::train

#include "titan/train/dry_run.h"

#include <algorithm>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "titan/train/build.h"

namespace titan::train {

DryRun::DryRun(const JobConfig& config, int world_size, int rank)
    : config_(config),
      world_(dist::init({.backend = "fake", .fake_rank = rank, .fake_world_size = world_size})),
      meshes_(build_job_meshes(config, world_)),
      model_(build_model(config, meshes_, at::kMeta)) {}

int64_t DryRun::num_micro_batches() const {
  const TrainingSettings& training = config_.training;
  if (training.global_batch_size < 0) return 1;
  const int64_t rows = training.local_batch_size * meshes_.dp_degree();
  return (training.global_batch_size + rows - 1) / rows;
}

void DryRun::run_micro_batch() {
  const TrainingSettings& training = config_.training;
  const at::Tensor tokens_BS =
      at::empty({training.local_batch_size, training.seq_len}, at::TensorOptions(at::kMeta).dtype(at::kLong));
  model_->loss(tokens_BS, at::empty_like(tokens_BS), tokens_BS.numel() * meshes_.dp_degree()).backward();
}

int smallest_world(const ParallelismSettings& settings) {
  const int64_t shard = std::max<int64_t>(settings.data_parallel_shard_degree, 1);
  return static_cast<int>(settings.data_parallel_replicate_degree * shard * settings.context_parallel_degree *
                          settings.tensor_parallel_degree);
}

}  // namespace titan::train

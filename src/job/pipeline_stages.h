#pragma once

// The pipeline stages of a job: the modules and the rank of each, and the tensors that travel between them.
// All of it follows from the settings, on every rank alike; nothing is exchanged.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "job/build.h"
#include "job/job_config.h"
#include "parallel/pipeline/split.h"
#include "titan/dist/world.h"
#include "titan/parallel/pipeline_schedule.h"
#include "train/pipeline/pipeline_runner.h"

namespace titan::train {

/// A parameter that modules of several stages use: each stage has a copy, under this name
/// (Parameter::on_other_stages), and the gradients of all copies belong together.
struct StageSharedParameter {
  std::string name;
  std::vector<int> stages;
};

struct StagePlan {
  /// The modules of each stage; without a pipeline one stage that has everything, unnamed.
  pipeline::StageModules modules = {{}};
  std::vector<int> rank_of_stage = {0};  ///< pipeline ranks
  std::vector<StageSharedParameter> shared;

  int num_stages() const { return static_cast<int>(modules.size()); }
  /// In ascending order.
  std::vector<int> stages_of(int pp_rank) const;
};

/// Throws ConfigError with all problems, each with its key.
StagePlan plan_stages(const JobConfig& config);

/// Checks the settings of a pipeline and adds to `problems`. `dims` is resolved.
void check_pipeline(const JobConfig& config, const ParallelDims& dims, std::vector<KeyedProblem>& problems);

/// The first world rank with the last stage, which computes the loss: TorchTitan's metrics rank.
int metrics_rank(const ParallelDims& dims, const StagePlan& plan);

/// The parallelized stages of this rank with their weights, in ascending order. Each is built by itself, and
/// no other stage ever has memory here. Without a pipeline the whole model. Collective over meshes.stage.
std::vector<std::unique_ptr<TrainableModel>> build_stages(const JobConfig& config, const StagePlan& plan,
                                                          const Meshes& meshes, at::Device device);

/// The type of the tensor that enters each stage for a micro-batch of `rows` sequences of `seq_len` tokens,
/// as on this rank's peers in the pipeline: entry 0 is the tokens. From a run of all stages on meta tensors,
/// with the other ranks played by the `fake` backend.
std::vector<TensorType> stage_boundaries(const JobConfig& config, const StagePlan& plan,
                                         const dist::World& world, int64_t rows, int64_t seq_len);

/// The stages of this rank, and the runner of a step of `num_batches` batches and of validation. Collective
/// over the world.
BuiltModels build_pipeline(const JobConfig& config, const Meshes& meshes, at::Device device,
                           int64_t num_batches);

/// The largest number of forwards in all stages of pipeline rank `pp_rank` that wait for their backward.
int most_under_way(const JobConfig& config, const StagePlan& plan, int pp_rank);

/// Divides a rank's memory budget in bytes by the largest number of forwards in flight.
void share_memory_budget(ActivationCheckpointSettings& settings, const pipeline::Schedule& schedule,
                         int pp_rank);

/// Names of the parameters on other pipeline ranks, if optimizer.param_groups ask for them; if not, none. Other ranks' stages are built on meta tensors.
std::vector<std::string> names_elsewhere(const JobConfig& config, const Meshes& meshes);

// ---- time and memory of each module in a model's sequence, for balanced stages (module_costs.cpp)

/// Work of a device per second. The defaults are those of bfloat16 matrix products on an H100; a split
/// depends only on their ratio.
struct DeviceSpeed {
  double flops = 500e12;
  double bytes = 2.5e12;
};

/// Computed from sizes, for a micro-batch of parallelism.pipeline_parallel_microbatch_size sequences, in the
/// order of the model's nn::LayerSequence: each module is built on meta tensors and run once.
/// - Time: operations / speed + bytes moved / speed. Operations are those of products with parameters (two
///   per element and token; twice that in the backward) and of causal attention. Embeddings look up rows, and
///   write a whole gradient matrix. The last module is the loss head, with its loss. Layers that activation
///   checkpointing recomputes are charged for it: in full, every n-th, or half under "op".
/// - Memory: weight, gradient and the optimizer's two moments in their dtypes, divided by the ranks that the
///   parameters are sharded over; a gathered copy in the compute dtype; and the tensors that the graph of a
///   forward saves (for layers that are recomputed in full, their input).
/// `dims` divides memory. Times are those of a single device, as the times of all stages are divided equally.
std::vector<pipeline::ModuleCost> computed_costs(const JobConfig& config, const ParallelDims& dims = {},
                                                 const DeviceSpeed& speed = {});

}  // namespace titan::train

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
  pipeline::StageModules modules = {
      {}};  ///< of each stage; without a pipeline one that has everything, unnamed
  std::vector<int> rank_of_stage = {0};  ///< pipeline ranks
  std::vector<StageSharedParameter> shared;

  int num_stages() const { return static_cast<int>(modules.size()); }
  /// In ascending order.
  std::vector<int> stages_of(int pp_rank) const;
};

/// Throws ConfigError with all problems, each with its key.
StagePlan plan_stages(const JobConfig& config);

/// Checks the settings of a pipeline; adds what is wrong to `problems`. `dims` is resolved.
void check_pipeline(const JobConfig& config, const ParallelDims& dims, std::vector<KeyedProblem>& problems);

/// The schedule of pipeline_parallel_schedule_csv, for one of the loader's batches, or nullopt if
/// the schedule is made by its name. Throws ConfigError.
std::optional<pipeline::Schedule> schedule_from_file(const ParallelismSettings& settings);

/// The first world rank with the last stage, which computes the loss: TorchTitan's metrics rank.
int metrics_rank(const ParallelDims& dims, const StagePlan& plan);

/// The stages of this rank, spread out and with their weights, in ascending order; each is built by itself,
/// and no other ever has memory here. Without a pipeline the whole model. Collective over meshes.stage.
std::vector<std::unique_ptr<TrainableModel>> build_stages(const JobConfig& config, const StagePlan& plan,
                                                          const Meshes& meshes, at::Device device);

/// The tensor that enters each stage for a micro-batch of `rows` sequences of `seq_len` tokens, as this
/// rank's peers in the pipeline have it: entry 0 is the tokens. From a run of all stages on meta tensors,
/// with the other ranks played by the `fake` backend.
std::vector<TensorType> stage_boundaries(const JobConfig& config, const StagePlan& plan,
                                         const dist::World& world, int64_t rows, int64_t seq_len);

/// The stages of this rank, and the runner of a step of `num_batches` batches and of validation. Collective
/// over the world.
BuiltModels build_pipeline(const JobConfig& config, const Meshes& meshes, at::Device device,
                           int64_t num_batches);

/// The largest number of forwards, of all stages of pipeline rank `pp_rank`, whose backward is still to come.
int most_under_way(const JobConfig& config, const StagePlan& plan, int num_ranks, int pp_rank);

/// A memory budget in bytes of a rank becomes that of one forward: its share if as many are under way as can
/// be.
void share_memory_budget(ActivationCheckpointSettings& settings, const pipeline::Schedule& schedule,
                         int pp_rank);

/// Names of the parameters on other pipeline ranks. Collective over meshes.pp.
std::vector<std::string> names_elsewhere(const std::vector<Parameter>& parameters, const Meshes& meshes);

}  // namespace titan::train

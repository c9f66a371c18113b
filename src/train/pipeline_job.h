#pragma once

// What a rank runs of the model, and by which schedules, from the settings.

#include "titan/train/job_config.h"
#include "titan/train/pipeline_stages.h"
#include "titan/train/trainer.h"

namespace titan::train {

/// The stages of this rank, built and spread out, with their weights, and the schedules of a step of
/// `num_batches` batches and of validation. Collective over the world.
StageParts build_stage_parts(const JobConfig& config, const Meshes& meshes, at::Device device,
                             int64_t num_batches);

/// Forwards whose backward is to come, of all of pipeline rank `pp_rank`'s stages, at the most.
int most_under_way(const JobConfig& config, const StagePlan& plan, int num_ranks, int pp_rank);

/// A budget in bytes of a rank becomes that of one forward: its share among the most that are under way on
/// this rank at a time.
void share_memory_budget(ActivationCheckpointSettings& settings, const pipeline::Schedule& schedule,
                         int pp_rank);

/// Names of the parameters on other pipeline ranks. Collective over meshes.pp.
std::vector<std::string> names_elsewhere(const std::vector<Parameter>& parameters, const Meshes& meshes);

}  // namespace titan::train

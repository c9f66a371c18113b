#pragma once

// Float8's delayed scales in a run: their reduction in each step, and their place in checkpoints.

#include <functional>

#include "titan/train/job_config.h"
#include "titan/train/trainer.h"

namespace titan::train {

/// The key of the histories in a checkpoint, which may lack them: a run may change its scaling at a resume.
inline constexpr const char* kDelayedScales = "float8_scales";

/// What TrainerParts::before_optimizer is to do; empty where no scales are delayed. Joins the checkpoints
/// (null: there are none), which may not outlive the result.
std::function<void()> build_delayed_scales(const JobConfig& config, const StageParts& stages,
                                           const Meshes& meshes, at::Device device,
                                           RunCheckpoints* checkpoints);

}  // namespace titan::train

#pragma once

// From settings to a trainer. With JobConfig's checks done (check_job) before, so that what fails here is the
// environment: files, memory, peers.

#include <memory>

#include "job/job_config.h"
#include "titan/dist/world.h"
#include "titan/train/trainer.h"

namespace titan::dist {
class Watchdog;
}

namespace titan::train {

/// Joins the job's other processes as [comm] and training.device say. Has to come before the first tensor.
dist::World build_world(const JobConfig& config);

/// The meshes of the job's degrees. Collective over the world.
Meshes build_job_meshes(const JobConfig& config, const dist::World& world);

/// The model on `device`, spread out, with its initial weights; on the meta device with their sizes alone.
/// `stage_modules`: of a pipeline stage, which then is all that is built; empty: the whole model. Collective
/// over the meshes, but for meshes.pp.
std::unique_ptr<TrainableModel> build_model(const JobConfig& config, const Meshes& meshes, at::Device device,
                                            const std::vector<std::string>& stage_modules = {});

/// The model, spread out, with its first weights; data; optimizer; checkpoints; logs. Collective over the
/// world. Its train() begins with what [checkpoint] says to load, and then writes the resolved config to
/// {dump_folder}/config.toml (rank 0). `on_terminal`: somebody watches the log, so it gets colours and the
/// remaining time. `checked`: what check_job has read, so that it isn't read again. `watchdog`:
/// make_watchdog's, if there is one already.
Trainer build_trainer(const JobConfig& config, const dist::World& world, bool on_terminal = false,
                      const CheckedFiles& checked = {}, const std::shared_ptr<dist::Watchdog>& watchdog = {});

}  // namespace titan::train

#pragma once

// From settings to a trainer. check_job() has passed before, so what fails here is the environment: files,
// memory, peers.

#include <memory>
#include <string>
#include <vector>

#include "job/job_config.h"
#include "titan/dist/world.h"
#include "titan/train/trainer.h"
#include "train/step_runner.h"

namespace titan::dist {
class Watchdog;
}

namespace titan::train {

using Models = std::vector<std::unique_ptr<TrainableModel>>;

/// Joins the job's other processes as [comm] and training.device say. Comes before the first tensor.
dist::World build_world(const JobConfig& config);

/// Collective over the world.
Meshes build_job_meshes(const JobConfig& config, const dist::World& world);

/// The model on `device`, spread out, with its initial weights; on the meta device only with their sizes.
/// `stage_modules`: of a pipeline stage, which then is all that is built; empty: the whole model. Collective
/// over the meshes, except meshes.pp.
std::unique_ptr<TrainableModel> build_model(const JobConfig& config, const Meshes& meshes, at::Device device,
                                            const std::vector<std::string>& stage_modules = {});

/// What this rank has of the model, and how it runs a step.
struct BuiltModels {
  Models models;
  std::vector<Parameter> parameters;  ///< of all of them
  std::unique_ptr<StepRunner> runner;
};
/// For steps of `num_batches` batches. Collective over the world.
BuiltModels build_models(const JobConfig& config, const Meshes& meshes, int64_t num_batches);

/// The tokenizer of training and validation, from `checked` if it is there; null if both replay recorded
/// tokens.
std::shared_ptr<const data::Tokenizer> build_job_tokenizer(const JobConfig& config,
                                                           const CheckedFiles& checked);
data::DataLoader build_training_loader(const JobConfig& config, const Meshes& meshes,
                                       const std::shared_ptr<const data::Tokenizer>& tokenizer);
/// Null if [validation] is off.
std::unique_ptr<TrainerPolicy> build_validation(const JobConfig& config, const Meshes& meshes,
                                                const std::shared_ptr<const data::Tokenizer>& tokenizer);

/// What [fault_tolerance] asks for, and stopping on signals. Collective over the world.
TrainerPolicies fault_tolerance_policies(const FaultToleranceSettings& settings, const dist::World& world);

/// Builds everything that a trainer needs: model, data, optimizer, checkpoints, observers and policies. Its
/// train() begins with what [checkpoint] says to load, and then writes the resolved config to
/// {dump_folder}/config.toml (rank 0). `on_terminal`: somebody watches the log, so it gets colours and the
/// remaining time. `checked`: what check_job has read already. `watchdog`: make_watchdog's, if there is one
/// already. Collective over the world.
Trainer build_trainer(const JobConfig& config, const dist::World& world, bool on_terminal = false,
                      const CheckedFiles& checked = {}, const std::shared_ptr<dist::Watchdog>& watchdog = {});

}  // namespace titan::train

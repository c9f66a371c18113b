#pragma once

// The training loop, as verbs. Built by build_trainer (train/build.h).

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "titan/checkpoint/hugging_face.h"
#include "titan/data/loader.h"
#include "titan/dist/world.h"
#include "titan/optim/clip.h"
#include "titan/optim/lr_schedule.h"
#include "titan/optim/optimizer.h"
#include "titan/parallel/parameters.h"
#include "titan/train/metrics.h"
#include "titan/train/metrics_window.h"
#include "titan/train/model_spec.h"
#include "titan/train/parallel_dims.h"
#include "titan/train/step_runner.h"
#include "titan/train/tied_gradients.h"
#include "titan/train/validation.h"

namespace titan::train {

/// Validation and where its batches come from.
struct Validator {
  ValidationSettings settings;
  data::DataLoader loader;
};

/// A schedule, and what enters each of its stages for one micro-batch (nothing where there is one stage).
struct ScheduleParts {
  pipeline::Schedule schedule;
  std::vector<TensorType> boundaries;
};

/// What of the model this rank runs, and in which order.
struct StageParts {
  std::vector<std::unique_ptr<TrainableModel>> models;
  std::vector<Stage> stages;  ///< the models with their places in the pipeline
  ScheduleParts step;
  int64_t micro_batch_rows = 0;             ///< of the loader's batches, cut for `step`
  std::optional<ScheduleParts> validation;  ///< forward only
};

/// Without a pipeline: steps of `num_batches` batches of `rows` sequences.
StageParts whole_model(std::unique_ptr<TrainableModel> model, int64_t num_batches, int64_t rows,
                       bool validates = false);

/// What a trainer works with, made by the build_* functions.
struct TrainerParts {
  dist::World world;
  Meshes meshes;
  at::Device device;
  StageParts stages;
  std::vector<Parameter> parameters;  ///< of all stages here
  TiedGradients tied;                 ///< what these share with other stages
  optim::Optimizer optimizer;
  optim::LrSchedule schedule;
  data::DataLoader loader;
  std::unique_ptr<MetricsLogger> logger;
  MetricsWindow window;
  std::optional<Validator> validator;
};

struct TrainerOptions {
  int64_t steps = 0;
  int64_t log_freq = 10;
  double max_norm = 1.0;
  int64_t train_timeout_s = 100;  ///< of collectives behind the first step
  /// The host reads a step's loss and gradient norm one step later, or when they are logged, so that a GPU
  /// never waits for it; a step that isn't finite is skipped on the device, and the error comes a step later.
  /// Needs the fused optimizer; unset: on a GPU with it.
  std::optional<bool> read_late;
  std::filesystem::path final_model;  ///< empty: the model isn't written
  std::optional<at::ScalarType> final_model_dtype;
  std::optional<HfModel> final_hf;  ///< set: final_model is a folder in Hugging Face's form
  std::filesystem::path hf_assets;  ///< whose tokenizer files go along; empty: none
};

/// What the host learns of a step.
struct StepValues {
  int64_t step = 0;
  double local_loss = 0;
  int loss_rank = -1;  ///< lowest rank whose loss isn't finite; -1: all are
  optim::GradNorm grad_norm;
};

class LateValues;  // src/train/late_values.h

class Trainer {
 public:
  Trainer(TrainerParts parts, TrainerOptions options);
  ~Trainer();

  /// All steps, or as many as the data gives. Collective over the world. Throws Error on every rank, before
  /// the optimizer step, when a loss or the gradient norm isn't finite. The message names the lowest rank
  /// whose loss it is; where all losses are finite, the rank in whose shard of the gradients it was first
  /// seen.
  void train();

 private:
  bool train_step();
  std::optional<std::vector<data::Batch>> fetch();
  at::Tensor forward_backward(const std::vector<data::Batch>& batches, const TokenCounts& tokens);
  StepValues update(const at::Tensor& loss);
  void launch_update(const at::Tensor& loss);
  /// Values of the step that was launched last: waits for the device. Throws when they aren't finite.
  StepValues read_launched();
  void check_finite(const StepValues& values) const;
  double rank_if(bool not_finite) const;
  int rank_from(double largest) const;
  void schedule_step();
  void log_step(const StepValues& values, const TokenCounts& tokens);
  void validate_if_due();
  void save_final_model();
  bool is_due(int64_t freq) const { return step_ == 1 || step_ % freq == 0; }

  TrainerParts parts_;
  TrainerOptions options_;
  StepRunner runner_;
  StepPlan step_plan_;
  std::optional<StepPlan> validation_plan_;
  std::unique_ptr<LateValues> launched_;
  int64_t step_ = 0;  // of the step in progress, from 1
};

}  // namespace titan::train

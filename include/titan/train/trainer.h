#pragma once

// The training loop, as verbs. Built by build_trainer (train/build.h).

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "titan/core/registry.h"
#include "titan/data/loader.h"
#include "titan/dist/world.h"
#include "titan/optim/clip.h"
#include "titan/optim/lr_schedule.h"
#include "titan/optim/optimizer.h"
#include "titan/parallel/parameters.h"
#include "titan/train/fault_tolerance_settings.h"
#include "titan/train/loss_spikes.h"
#include "titan/train/metrics.h"
#include "titan/train/model_spec.h"
#include "titan/train/nonfinite_steps.h"
#include "titan/train/parallel_dims.h"
#include "titan/train/run_checkpoints.h"
#include "titan/train/run_observer.h"
#include "titan/train/step_runner.h"
#include "titan/train/stop_agreement.h"
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
  std::vector<std::unique_ptr<TrainableModel>> models = {};
  std::vector<Stage> stages = {};  ///< the models with their places in the pipeline
  ScheduleParts step;
  int64_t micro_batch_rows = 0;                  ///< of the loader's batches, cut for `step`
  std::optional<ScheduleParts> validation = {};  ///< forward only
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
  MetricsWindow window;
  std::optional<Validator> validator;
  std::unique_ptr<RunCheckpoints> checkpoints = {};  ///< null: nothing is loaded or saved
  RunObservers observers = {};
  /// What else changes with a step (Float8's delayed scales): called just before the optimizer's, on every
  /// rank, when no save reads the state any more.
  std::function<void()> before_optimizer = {};
};

/// Makes an object of yours that joins the checkpoints of `titan train` under its name here; null: not those
/// of this run. Called before anything is loaded; the parts live as long as the object.
///
///   titan::train::saved_objects().add("averages", [](TrainerParts& parts) {
///     return std::make_unique<Averages>(parts.parameters);
///   });
using MakeSavedObject = std::function<std::unique_ptr<checkpoint::Stateful>(TrainerParts& parts)>;
Registry<MakeSavedObject>& saved_objects();

/// Runs a step with non-finite numbers again, to find where they come from; see guard/step_replay.h.
using ReplayStep = std::function<std::string(
    const dist::World& world, const Meshes& meshes, const std::vector<Stage>& stages,
    const std::vector<Parameter>& parameters, int64_t step, const std::function<at::Tensor()>& run_again)>;

struct TrainerOptions {
  int64_t steps = 0;
  int64_t log_freq = 10;
  double max_norm = 1.0;
  int64_t train_timeout_s = 100;  ///< of collectives behind the first step
  /// The host reads a step's loss and gradient norm one step later, or when they are logged, so that a GPU
  /// never waits for it; a step that isn't finite is skipped on the device, and the error comes a step later.
  /// Needs the fused optimizer; unset: on a GPU with it.
  std::optional<bool> read_late;
  bool seed_checkpoint = false;  ///< save the model as step 0, in place of training
  uint64_t seed = 0;             ///< of the run, where random numbers can't go on as they were
  FaultToleranceSettings fault_tolerance = {};
  ReplayStep replay = {};  ///< null: an error says nothing about the number's origin
  /// Called when all is loaded: from here on an earlier run's records may be replaced.
  std::function<void()> on_start = {};
};

/// How far training is.
struct Progress {
  int64_t step = 0;            ///< of the step in progress, from 1
  int64_t schedule_steps = 0;  ///< learning rates that were used: the step, unless the schedule began anew
  int64_t tokens_before = 0;   ///< seen before this process's first step
  NonFiniteSteps nonfinite;
  LossSpikes spikes;
};

/// What the host learns of a step.
struct StepValues {
  int64_t step = 0;
  double local_loss = 0;
  int loss_rank = -1;  ///< lowest rank whose loss isn't finite; -1: all are
  optim::GradNorm grad_norm;
  bool finite() const { return loss_rank < 0 && grad_norm.finite(); }
};

/// How a run ended.
struct RunEnd {
  int64_t step = 0;     ///< the last one made
  StopCause stop = {};  ///< why it was that one; no signal: its data or steps were through
};

/// What a step computes on: enough to do it again.
struct StepInput {
  std::vector<data::Batch> batches;
  TokenCounts tokens;
};

class LateValues;  // src/train/policies/late_values.h

class Trainer {
 public:
  Trainer(TrainerParts parts, TrainerOptions options);
  ~Trainer();

  /// All steps that are left, or as many as the data gives. Collective over the world. Throws Error on every
  /// rank, before the optimizer step, when a loss or the gradient norm isn't finite and isn't to be skipped.
  /// The message names the lowest rank whose loss it is; where all losses are finite, the rank in whose shard
  /// of the gradients it was first seen. Then it says what the step's forwards and backwards, run again,
  /// showed of the module and the rank that made the number (src/train/step_replay.h).
  ///
  /// A signal that a SignalWatch notes on any rank ends it early, between steps, within a validation or while
  /// data is awaited; what isn't saved yet is saved once, with the whole state.
  RunEnd train();

 private:
  bool start();
  bool load();
  void run_steps();
  void end_step();
  RunEnd finish();
  void save_seed();
  StopCause stop();
  void save_at_stop(const std::string& who_stops);
  int64_t last_step() const;
  bool has_ended() const;
  /// False: there is no step to make, as the data ends or all ranks stop.
  bool train_step();
  std::optional<std::vector<data::Batch>> fetch();
  std::optional<data::Batch> fetch_validation();
  at::Tensor forward_backward(const StepInput& input);
  StepValues update(const at::Tensor& loss, const StepInput& input);
  void launch_update(const at::Tensor& loss, const StepInput& input);
  /// Values of the step that was launched last: waits for the device. Throws when they aren't finite.
  StepValues read_launched();
  /// Counts a step that isn't finite and lets it pass, or throws, as [fault_tolerance] says.
  void judge(const StepValues& values, const StepInput& input);
  std::string nonfinite_number(const StepValues& values) const;
  std::string replay(const StepValues& values, const StepInput& input);
  double loss_of_all(const StepValues& values) const;
  double rank_if(bool not_finite) const;
  int rank_from(double largest) const;
  void schedule_step();
  void log_step(const StepValues& values, const TokenCounts& tokens);
  void let_state_change();
  /// True: the step's loss was a spike, and the run has gone back to before it.
  bool rewind_if_spiked();
  bool rewind();
  bool load_before_spike(int64_t spike, int64_t distance);
  /// On all ranks: one or more know of a save that failed.
  [[noreturn]] void fail_with_save();
  bool is_save_due(bool is_last);
  void save(bool is_last);
  void check_replicas_if_due(bool saves);
  void validate_if_due();
  PhaseScope phase(Phase phase) const { return {parts_.observers, phase, progress_.step}; }
  bool is_due(int64_t freq) const { return progress_.step == 1 || progress_.step % freq == 0; }

  TrainerParts parts_;
  TrainerOptions options_;
  StepRunner runner_;
  StepPlan step_plan_;
  std::optional<StepPlan> validation_plan_;
  StopAgreement stop_;
  std::unique_ptr<LateValues> launched_;
  StepInput launched_input_;  // of that step
  Progress progress_;
  int64_t last_step_ = 0;
  bool spiked_ = false;
  bool is_loaded_ = false;     // what there is to go on from
  int64_t started_at_ = 0;     // the state behind it was loaded, or is that of the beginning
  bool save_is_late_ = false;  // one is due behind the next step whose numbers are finite
  std::vector<std::unique_ptr<checkpoint::Stateful>> saved_;  // over the members above
};

}  // namespace titan::train

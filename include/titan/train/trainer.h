#pragma once

// The training loop. A step is: fetch, forward and backward, clip, update, log; decisions about a run are
// policies (policy.h). The program builds its trainer from settings (src/job/build.h).

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "titan/checkpoint/checkpointer.h"
#include "titan/core/registry.h"
#include "titan/data/loader.h"
#include "titan/dist/world.h"
#include "titan/optim/lr_schedule.h"
#include "titan/optim/optimizer.h"
#include "titan/parallel/parameters.h"
#include "titan/train/model_spec.h"
#include "titan/train/parallel_dims.h"
#include "titan/train/policy.h"
#include "titan/train/run_end.h"
#include "titan/train/run_observer.h"

namespace titan::train {

class RunCheckpoints;  // src/train/checkpoints/run_checkpoints.h
class StepNumbers;     // src/train/step_runner.h
class StepRunner;      // src/train/step_runner.h

/// What a trainer works with.
struct TrainerParts {
  dist::World world;
  Meshes meshes;
  at::Device device;
  std::vector<std::unique_ptr<TrainableModel>> models;  ///< this rank's: the whole model, or its parts of it
  std::unique_ptr<StepRunner> runner;                   ///< runs forward and backward of these models
  std::vector<Parameter> parameters;                    ///< of these models
  optim::Optimizer optimizer;
  optim::LrSchedule schedule;
  data::DataLoader loader;
  MetricsWindow window;
  std::unique_ptr<RunCheckpoints> checkpoints;  ///< null: nothing is loaded or saved
  RunObservers observers = {};
  TrainerPolicies policies = {};
};

/// Makes an object of yours that joins the checkpoints of `titan train` under its name here; null: not those
/// of this run. Called before anything is loaded; the parts live as long as the object.
///
///   titan::train::saved_objects().add("averages", [](TrainerParts& parts) {
///     return std::make_unique<Averages>(parts.parameters);
///   });
using MakeSavedObject = std::function<std::unique_ptr<checkpoint::Stateful>(TrainerParts& parts)>;
Registry<MakeSavedObject>& saved_objects();

struct TrainerOptions {
  int64_t steps = 0;
  int64_t log_freq = 10;
  double max_norm = 1.0;
  int64_t train_timeout_s = 100;  ///< of collectives after the first step
  /// The host reads a step's loss and gradient norm one step later, or when they are logged, so that a GPU
  /// never waits for it; a step that isn't finite is skipped on the device, and the error comes a step later.
  /// Needs the fused optimizer; unset: on a GPU with it.
  std::optional<bool> read_late;
  bool seed_checkpoint = false;  ///< save the model as step 0 instead of training
  uint64_t seed = 0;             ///< of the run, for random numbers that can't continue as they were
  /// Called once everything is loaded: from here on the records of an earlier run may be replaced.
  std::function<void()> on_start = {};
};

/// How far training is.
struct Progress {
  int64_t step = 0;            ///< the step in progress, from 1
  int64_t schedule_steps = 0;  ///< learning rates used so far: the step, unless the schedule started anew
  int64_t tokens_before = 0;   ///< seen before this process's first step
};

class Trainer {
 public:
  Trainer(TrainerParts parts, TrainerOptions options);
  ~Trainer();

  /// Trains the steps that are left, or as many as the data gives. Collective over the world. Throws
  /// UnsoundRun on every rank, before the optimizer step, when a loss or the gradient norm isn't finite and
  /// no policy skips the step. The message names the lowest rank whose loss it is or, if all losses are
  /// finite, the rank in whose shard of the gradients it was first seen. A policy's vote ends the run early,
  /// between steps, within a validation or while data is awaited; what isn't saved yet is saved once, with
  /// the whole state.
  RunEnd train();

  // ---- for policies

  TrainerParts& parts() { return parts_; }
  int64_t step() const { return progress_.step; }
  /// True at step 1 and every `freq` steps.
  bool is_due(int64_t freq) const { return progress_.step == 1 || progress_.step % freq == 0; }
  PhaseScope phase(Phase phase) const { return {parts_.observers, phase, progress_.step}; }
  /// The numbers of the last step, waiting for the device where they are read late.
  const StepValues& settle();
  /// The step's loss over the whole batch: the same bits on all ranks. Collective over the world.
  double loss_of_all(const StepValues& values) const;
  at::Tensor forward_backward(const StepInput& input);
  /// Waits for the loader's next step. False: a policy gives up waiting.
  bool wait_for(data::DataLoader& loader);
  /// The labels that count in these batches of this rank, and those of all ranks; nullopt: a policy stops the
  /// run, on all ranks. Throws Error on all ranks where one can't go on. Collective over the world.
  std::optional<TokenCounts> agree(const std::vector<data::Batch>& batches);
  /// Loads the newest checkpoint of this run before `step`; training continues from it with the next batch.
  /// False: there is none. Collective over the world.
  bool load_before(int64_t step);

 private:
  bool start();
  bool load();
  void run_steps();
  bool train_step();
  void end_step();
  RunEnd finish();
  StopCause stop();
  int64_t last_step() const;
  bool has_ended() const;

  std::optional<StepInput> fetch();
  std::optional<std::vector<data::Batch>> next_batches();
  void schedule_step();
  void clip(const at::Tensor& loss);
  void update(StepInput input);
  void log_step(const StepValues& values, const TokenCounts& tokens);
  void judge(const StepValues& values, const StepInput& input);
  std::string explain(const NonFiniteStep& step);
  std::string describe_nonfinite(const StepValues& values) const;

  void add_saved_state();
  void save_seed();
  void save_if_due();
  void save(bool is_last, bool to_disk);
  void save_at_stop(const std::string& reason);
  [[noreturn]] void fail_with_save();

  TrainerParts parts_;
  TrainerOptions options_;
  Progress progress_;
  std::unique_ptr<StepNumbers> numbers_;
  std::optional<StepInput> unread_;  // input of the step whose numbers haven't been read
  StepValues values_;                // the last that were read
  int64_t last_step_ = 0;
  bool stopping_ = false;
  bool is_loaded_ = false;
  int64_t started_at_ = 0;     // the step whose state was loaded; -1: it was in memory only, not on disk
  bool save_is_late_ = false;  // a save was put off to the next step whose numbers are finite
  std::vector<std::unique_ptr<checkpoint::Stateful>> saved_;  // refer to the members above
};

}  // namespace titan::train

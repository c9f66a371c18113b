#pragma once

// The training loop. A step is: fetch, forward and backward, clip, update, log; decisions about a run are
// policies (policy.h). The program builds a trainer's parts from settings (src/job/build.h):
//
//   titan::train::TrainerParts parts = ...;
//   titan::train::Trainer trainer(std::move(parts), {.steps = 1000, .log_freq = 10});
//   const titan::train::RunEnd end = trainer.train();  // on every rank

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
class StepGraphs;      // src/train/step_graphs.h
class StepNumbers;     // src/train/step_runner.h
class StepRunner;      // src/train/step_runner.h
struct Agreement;      // src/train/step_runner.h
struct Ballot;         // src/train/step_runner.h
struct ClippedStep;    // src/train/step_runner.h

/// The objects that a trainer works with.
struct TrainerParts {
  dist::World world;
  Meshes meshes;
  at::Device device;
  std::vector<std::unique_ptr<TrainableModel>> models;  ///< the whole model, or this rank's stages of it
  std::unique_ptr<StepRunner> runner;                   ///< runs these models' forward and backward
  std::vector<Parameter> parameters;                    ///< all parameters of these models
  optim::Optimizer optimizer;
  optim::LrSchedule schedule;
  data::DataLoader loader;
  MetricsWindow window;
  std::unique_ptr<RunCheckpoints> checkpoints;  ///< null: nothing is loaded or saved
  RunObservers observers = {};
  TrainerPolicies policies = {};
};

/// Makes your object, which the checkpoints of `titan train` then hold under its registered name; null: not
/// in this run. Called before anything is loaded; the parts live as long as the object.
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
  int64_t train_timeout_s = 100;  ///< time limit of collectives after the first step
  /// The host reads and logs a step's loss and gradient norm one step later, so that a GPU never waits for the
  /// host. The device itself skips a non-finite step, and the error comes one step later.
  /// Needs the fused optimizer. Unset: true on a GPU with that optimizer.
  std::optional<bool> read_late;
  /// On a GPU: records steps as CUDA graphs (docs/gpu_performance.md). Needs read_late, and a current
  /// stream other than the default one since before the models were made.
  bool record_steps = false;
  int64_t tokens_per_epoch = 0;  ///< about; 0: unknown. Only rank 0 uses it, in its log
  bool seed_checkpoint = false;  ///< save the model as step 0 instead of training
  uint64_t seed = 0;             ///< seeds random numbers whose saved state doesn't fit this run's ranks
  /// Called once everything is loaded: from then on the records of an earlier run may be replaced.
  std::function<void()> on_start = {};
};

/// How far training has come.
struct Progress {
  int64_t step = 0;            ///< the step in progress, from 1
  int64_t schedule_steps = 0;  ///< learning rates used so far: `step`, unless the schedule was restarted
  int64_t tokens_before = 0;   ///< tokens seen before this process's first step
};

class Trainer {
 public:
  Trainer(TrainerParts parts, TrainerOptions options);
  ~Trainer();

  /// Runs the remaining steps, or as many as there is data for. Collective over the world. Throws UnsoundRun
  /// on every rank, before the optimizer step, if a loss or the gradient norm isn't finite and no policy
  /// skips the step. The message names the lowest rank with such a loss or, if all losses are finite, the
  /// rank whose shard of the gradients showed it first. A policy's vote ends the run early: between steps,
  /// within a validation or while waiting for data. The whole state is then saved, unless it is saved
  /// already.
  RunEnd train();

  // ---- for policies

  TrainerParts& parts() { return parts_; }
  int64_t step() const { return progress_.step; }
  /// True at step 1 and every `freq` steps.
  bool is_due(int64_t freq) const { return progress_.step == 1 || progress_.step % freq == 0; }
  PhaseScope phase(Phase phase) const { return {parts_.observers, phase, progress_.step}; }
  /// The numbers of the last step, which is then logged if that is due. Waits for the device if they are read late.
  /// Collective over the world.
  const StepValues& settle();
  /// The step's loss over the whole batch: the same bits on all ranks. Collective over the world, unless the step is logged or a policy
  /// `reads_loss()`.
  double loss_of_all(const StepValues& values) const;
  at::Tensor forward_backward(const StepInput& input);
  /// Waits for the loader's next step. False: a policy gave up waiting.
  bool wait_for(data::DataLoader& loader);
  /// Counts the valid labels in these batches of this rank and over all ranks; nullopt: a policy stops the
  /// run, on all ranks. Throws Error on all ranks if one can't continue. Collective over the world.
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
  void log_data_read() const;
  StopCause stop();
  int64_t last_step() const;
  bool has_ended() const;

  std::optional<Agreement> go_on(const std::vector<data::Batch>& batches, Ballot mine);
  Agreement exchange(const std::vector<data::Batch>& batches, Ballot mine);
  std::optional<StepInput> fetch();
  std::optional<std::vector<data::Batch>> next_batches();
  int64_t tokens_in(const std::vector<data::Batch>& batches) const;
  void schedule_step();
  ClippedStep run_graph(const StepInput& input);
  void update(StepInput input, const ClippedStep& clipped);
  void read_numbers();
  void log_step();
  void judge(const StepValues& values, const StepInput& input);
  std::string explain(const NonFiniteStep& step);
  std::string describe_nonfinite(const StepValues& values) const;

  void add_saved_state();
  void save_seed();
  void save_if_due();
  void save(bool is_last, bool to_disk);
  void save_at_stop(const std::string& reason);
  [[noreturn]] void fail_with_save();

  struct Unlogged {
    StepMetrics metrics;
    TokenCounts tokens;
  };

  TrainerParts parts_;
  TrainerOptions options_;
  Progress progress_;
  std::unique_ptr<StepNumbers> numbers_;
  std::unique_ptr<StepGraphs> graphs_;  // null: steps aren't recorded
  std::optional<StepInput> unread_;     // input of the step whose numbers haven't been read
  StepValues values_;                   // the last ones read
  std::optional<Unlogged> unlogged_;    // a step that waits for its loss
  int64_t last_step_ = 0;
  bool stopping_ = false;
  bool is_loaded_ = false;
  int64_t started_at_ = 0;     // the step whose state was loaded; -1: it was in memory only, not on disk
  bool save_is_late_ = false;  // a save was postponed to the next finite step
  std::vector<std::unique_ptr<checkpoint::Stateful>> saved_;  // refer to the members above
};

}  // namespace titan::train

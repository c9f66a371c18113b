#pragma once

// [Note: one step runner]
// A schedule (parallel/pipeline_schedule.h) says what a rank does in one optimizer step. Without a pipeline
// it has one stage: F0 B0 F1 B1 ...; a pipeline's are longer lists for the same runner. Accumulation, token
// counts and the moment at which gradients are reduced exist here once, and nowhere else.
//
// [Note: who gathers parameters]
// A schedule with Unshard actions takes the stages' parameters out of the hands of fully_shard's hooks
// (ScheduledSharding). One without leaves them there: each layer gathers before its use.

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/data/loader.h"
#include "titan/dist/device_mesh.h"
#include "titan/parallel/parameters.h"
#include "titan/parallel/pipeline_runtime.h"
#include "titan/parallel/pipeline_schedule.h"
#include "titan/train/model_spec.h"

namespace titan::train {

/// F0 B0 F1 B1 ...: each micro-batch's activations are gone before the next one starts.
pipeline::Schedule one_stage_schedule(int num_micro_batches);
/// F0 F1 ...: evaluation.
pipeline::Schedule one_stage_forward_schedule(int num_micro_batches);

/// What counts in a step: labels that aren't -100.
struct TokenCounts {
  int64_t local = 0;   ///< in this rank's rows, over its micro-batches
  int64_t global = 0;  ///< in the rows of all ranks
};

/// Whole rows are counted, before context parallelism cuts them: `batch_mesh` is of the ranks that read
/// different ones.
TokenCounts count_valid_tokens(const std::vector<data::Batch>& micro_batches, const DeviceMesh& batch_mesh);

/// Each batch as micro-batches of `rows` rows, which divide it, sharing its memory.
std::vector<data::Batch> split_rows(const std::vector<data::Batch>& batches, int64_t rows);

/// A stage that this rank runs; without a pipeline stage 0, the whole model. The model outlives the runner.
struct Stage {
  TrainableModel* model = nullptr;
  int index = 0;
};

/// Of what travels between two stages, as this rank has it.
struct TensorType {
  std::vector<int64_t> sizes;
  at::ScalarType dtype = at::kFloat;
  friend bool operator==(const TensorType&, const TensorType&) = default;
};

/// A schedule as one rank runs it, with everything looked up: made once by StepRunner::plan, run many times.
class StepPlan {
 public:
  int num_micro_batches() const { return num_micro_batches_; }

  /// The runner's own.
  struct Planned {
    pipeline::Action action;
    size_t stage = 0;             // of this rank's
    size_t cell = 0;              // of this stage and micro-batch
    int64_t neighbour_cell = -1;  // of the stage that takes the result, where it is on this rank
    const pipeline::Link* link = nullptr;
    size_t boundary = 0;  // of a transfer: the stage that it enters or, backwards, leaves
    const char* label = "";
    bool last_backward = false;
    bool joined_with_next = false;  // a message that goes in one call with the next action's
  };

 private:
  friend class StepRunner;
  friend class RunningStep;
  std::vector<Planned> actions_;
  std::vector<TensorType> boundaries_;  // by the stage that they enter
  int num_stages_ = 0;                  // of all ranks
  int num_micro_batches_ = 0;
};

/// When one action of a step ran, by the host's steady clock.
struct ActionTime {
  pipeline::Action action;
  double start_s = 0;
  double end_s = 0;
  double waited_s = 0;  ///< of it, for what another rank sends
};

/// Runs schedules on the stages of one rank.
class StepRunner {
 public:
  /// Without a pipeline.
  StepRunner(TrainableModel& model, at::Device device);
  /// `stages`: this rank's, in ascending order. `pp`: one axis.
  StepRunner(std::vector<Stage> stages, const DeviceMesh& pp, at::Device device);

  /// Collective over the pipeline's ranks. boundaries[s]: what enters stage s (s >= 1) for one micro-batch.
  /// Throws ConfigError for a schedule of several stages that check_schedule() refuses, and Error where its
  /// stages of this rank aren't the runner's. A schedule with Unshard actions takes the stages' sharding
  /// over.
  StepPlan plan(const pipeline::Schedule& schedule, std::vector<TensorType> boundaries = {});

  /// Runs it. Returns this rank's share of the step's loss, sum over its valid tokens / global count, as a
  /// float64 scalar on the device (reading it waits for a GPU); 0 on ranks without the last stage. When it
  /// returns the gradients of the whole step are reduced. `global_valid_tokens` must be positive. An
  /// exception in a pipeline becomes an Error that names the action it came in, and ends the pipeline:
  /// messages of that step may be on the way, so further runs are refused. Without one the next run is as
  /// good as any.
  at::Tensor run(const StepPlan& plan, const std::vector<data::Batch>& micro_batches,
                 int64_t global_valid_tokens);

  const std::vector<Stage>& stages() const { return stages_; }

  /// From now on each run() appends the times of its actions; null: no more. On a GPU they say when work was
  /// queued.
  void record_times(std::vector<ActionTime>* times) { times_ = times; }

 private:
  friend class RunningStep;
  void prepare_step();
  int64_t local_stage(int index) const;
  void join_messages(StepPlan& plan, const pipeline::Schedule& schedule) const;
  StepPlan::Planned planned(const pipeline::Action& action, const pipeline::Schedule& schedule) const;
  std::string failure_of(const StepPlan& plan, size_t action, const std::string& reason) const;

  std::vector<Stage> stages_;
  pipeline::Links links_;
  at::Device device_;
  std::vector<ScheduledSharding> shardings_;  // of the stages; empty while the hooks gather
  std::vector<ActionTime>* times_ = nullptr;
  bool failed_ = false;  // a step of a pipeline
};

}  // namespace titan::train

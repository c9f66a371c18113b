#pragma once

// [Note: pipeline runner]
// A schedule (parallel/pipeline_schedule.h) says what a rank does in one optimizer step: forwards and
// backwards of its stages, messages to other ranks, and when parameters are gathered, freed and reduced. The
// runner makes a plan of it once, with everything looked up, and runs that in every step.
//
// A schedule with Unshard actions takes the stages' parameters out of the hands of fully_shard's hooks
// (ScheduledSharding). One without leaves them there: each layer gathers before its use.

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "parallel/pipeline_runtime.h"
#include "titan/dist/device_mesh.h"
#include "titan/parallel/parameters.h"
#include "titan/parallel/pipeline_schedule.h"
#include "train/step_runner.h"

namespace titan::train {

using Stage = ModelPart;

/// A tensor that travels between two stages, as this rank has it.
struct TensorType {
  std::vector<int64_t> sizes;
  at::ScalarType dtype = at::kFloat;
  friend bool operator==(const TensorType&, const TensorType&) = default;
};

/// Each batch as micro-batches of `rows` rows, which divide it, sharing its memory.
std::vector<data::Batch> split_rows(const std::vector<data::Batch>& batches, int64_t rows);

/// A schedule as one rank runs it, with everything looked up: made once by PipelineRunner::plan, run many
/// times.
struct StepPlan {
  struct Planned {
    pipeline::Action action;
    size_t stage = 0;             // among this rank's
    size_t cell = 0;              // of this stage and micro-batch
    int64_t neighbor_cell = -1;  // of the stage that takes the result, if it is on this rank
    const pipeline::Link* link = nullptr;
    size_t boundary = 0;  // of a transfer: the stage that it enters or, backwards, leaves
    const char* label = "";
    bool last_backward = false;
    bool joined_with_next = false;  // a message that goes in one call with the next action's
  };
  std::vector<Planned> actions;
  std::vector<TensorType> boundaries;  // by the stage that they enter
  int num_stages = 0;                  // on all ranks
  int num_micro_batches = 0;
};

/// A parameter that several pipeline stages have (tied embeddings): one value, whose gradient is the sum of
/// what each stage's copy got.
class TiedGradients {
 public:
  TiedGradients() = default;
  /// `parameters`: of all stages here, in their order; copies bear one name. Marks all but the
  /// pipeline's first as duplicates. Collective over `pp`.
  TiedGradients(std::vector<Parameter>& parameters, const DeviceMesh& pp);
  /// Gives each copy the sum of all copies' gradients, which are reduced already.
  void sum() const;

 private:
  struct Tied {
    std::vector<at::Tensor> copies;      // leaves, here
    std::shared_ptr<dist::Group> group;  // null: all copies are here
    const char* name = "";
  };
  std::vector<Tied> tied_;
};

/// Memory for messages of one step, reused from micro-batch to micro-batch: as many buffers as are in use at
/// once.
class ReceiveBuffers {
 public:
  explicit ReceiveBuffers(at::Device device) : device_(device) {}

  /// A tensor without a graph, whose memory nobody else has: a tensor that this gave before, a view of it or
  /// what a graph saved of it keeps the memory from being given again. Its content is anything.
  at::Tensor take(const TensorType& type) {
    for (const at::Tensor& buffer : buffers_)
      if (buffer.sizes() == type.sizes && buffer.scalar_type() == type.dtype && is_free(buffer))
        return buffer.variable_data();
    buffers_.push_back(at::empty(type.sizes, at::TensorOptions(device_).dtype(type.dtype)));
    return buffers_.back().variable_data();
  }

 private:
  // On the host a backend's thread may have been the last to let go: what it did comes before what follows.
  // On a GPU whoever let go has queued all that uses the memory, and a receive starts after what is queued.
  static bool is_free(const at::Tensor& buffer) {
    if (buffer.storage().use_count() != 1) return false;
    std::atomic_thread_fence(std::memory_order_acquire);
    return true;
  }

  at::Device device_;
  std::vector<at::Tensor> buffers_;
};

/// A schedule, and what enters each of its stages for one micro-batch.
struct ScheduleParts {
  pipeline::Schedule schedule;
  std::vector<TensorType> boundaries;
};

/// When one action of a step ran, by the host's steady clock.
struct ActionTime {
  pipeline::Action action;
  double start_s = 0;
  double end_s = 0;
  double waited_s = 0;  ///< the part of it spent waiting for another rank's message
};

/// Runs schedules on the stages of one rank.
class PipelineRunner final : public StepRunner {
 public:
  /// `stages`: this rank's, in ascending order. `pp`: one axis.
  PipelineRunner(std::vector<Stage> stages, const DeviceMesh& pp, at::Device device);

  // ---- what the trainer calls

  /// What forward_backward() and forward() run, on micro-batches of `micro_batch_rows` sequences. Collective
  /// over pp.
  void set_schedules(const ScheduleParts& training, const std::optional<ScheduleParts>& evaluation,
                     int64_t micro_batch_rows, TiedGradients tied);
  at::Tensor forward_backward(const std::vector<data::Batch>& batches, int64_t global_valid_tokens) override;
  at::Tensor forward(const data::Batch& batch, int64_t global_valid_tokens) override;
  const std::vector<Stage>& models() const override { return stages_; }

  // ---- one schedule

  /// boundaries[s]: what enters stage s (s >= 1) for one micro-batch. Throws ConfigError for a schedule of
  /// several stages that check_schedule() refuses, and Error if its stages of this rank aren't the runner's.
  /// Collective over pp.
  StepPlan plan(const pipeline::Schedule& schedule, std::vector<TensorType> boundaries = {});
  /// Returns the loss as forward_backward() does; 0 on ranks without the last stage. An exception becomes an
  /// Error that names the action in which it occurred, and ends the pipeline: messages of that step may still
  /// be on the way, so further runs are refused.
  at::Tensor run(const StepPlan& plan, const std::vector<data::Batch>& micro_batches,
                 int64_t global_valid_tokens);
  /// From now on each run() appends the times of its actions; null: no more. On a GPU they say when work was
  /// queued.
  void record_times(std::vector<ActionTime>* times) { times_ = times; }

 private:
  friend class RunningStep;
  int64_t local_stage(int index) const;
  void join_messages(StepPlan& plan, const pipeline::Schedule& schedule) const;
  StepPlan::Planned planned(const pipeline::Action& action, const pipeline::Schedule& schedule) const;
  std::string failure_of(const StepPlan& plan, size_t action, const std::string& reason) const;

  std::vector<Stage> stages_;
  pipeline::Links links_;
  at::Device device_;
  std::optional<StepPlan> training_, evaluation_;
  int64_t micro_batch_rows_ = 0;
  TiedGradients tied_;
  std::vector<ScheduledSharding> shardings_;  // of the stages; empty while the hooks gather
  std::vector<ActionTime>* times_ = nullptr;
  bool failed_ = false;
};

}  // namespace titan::train

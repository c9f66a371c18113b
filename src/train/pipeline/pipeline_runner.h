#pragma once

// [Note: pipeline runner]
// A schedule (parallel/pipeline_schedule.h) says what a rank does in one optimizer step: forwards and
// backwards of its stages, messages to other ranks, and when parameters are gathered, freed and reduced. The
// runner turns it into a plan once, with everything looked up, and runs that plan in every step.
//
// A schedule with Unshard actions gathers the stages' parameters itself, in place of fully_shard's hooks
// (ScheduledSharding). Without such actions, the hooks gather each layer before its use.

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "parallel/pipeline_runtime.h"
#include "titan/dist/device_mesh.h"
#include "titan/parallel/parameters.h"
#include "titan/parallel/pipeline_schedule.h"
#include "train/batch_copies.h"
#include "train/step_runner.h"

namespace titan::train {

using Stage = ModelPart;

/// The type of a tensor that is sent between two stages: this rank's part of it.
struct TensorType {
  std::vector<int64_t> sizes;
  at::ScalarType dtype = at::kFloat;
  friend bool operator==(const TensorType&, const TensorType&) = default;
};

/// Splits each batch into micro-batches of `rows` rows, which are views of it. `rows` must divide each batch. The
/// labels of a part aren't counted: those of a recorded step are on the device.
std::vector<data::Batch> split_rows(const std::vector<data::Batch>& batches, int64_t rows);

/// One rank's part of a schedule, with everything looked up: made once by PipelineRunner::plan, run many
/// times.
struct StepPlan {
  struct Planned {
    pipeline::Action action;
    size_t stage = 0;            // index among this rank's stages
    size_t cell = 0;             // index for this stage and micro-batch
    int64_t neighbor_cell = -1;  // for the stage that takes the result, if it is on this rank
    const pipeline::Link* link = nullptr;
    size_t boundary = 0;  // for a transfer: the stage that it enters or, in the backward, leaves
    const char* label = "";
    bool last_backward = false;
    /// The stage's last backward in a step, and its forward; or its last weight gradients, if they are computed apart.
    bool before_reduction = false;
    bool joined_with_next = false;  // this message and the next action's share one call
  };
  std::vector<Planned> actions;
  std::vector<Planned> first_actions;  // on GPUs, those of the first run ([Note: first run of a schedule])
  mutable bool has_run = false;
  std::vector<TensorType> boundaries;  // indexed by the stage that they enter
  int num_stages = 0;                  // on all ranks
  int num_micro_batches = 0;
};

/// The pipeline ranks that have copies of each tied parameter, by its name: ascending, each once.
using TiedHolders = std::map<std::string, std::vector<int>>;

/// Parameters that several pipeline stages share (tied embeddings): one value each, whose gradient is the sum
/// over the stages' copies.
class TiedGradients {
 public:
  TiedGradients() = default;
  /// `parameters`: those of this rank's stages, in stage order; copies have the same name. Marks all copies
  /// but the pipeline's first as duplicates. Collective over `pp`.
  TiedGradients(std::vector<Parameter>& parameters, const DeviceMesh& pp, const TiedHolders& holders);
  /// Sets each copy's gradient to the sum of all copies' gradients. Call it once they are reduced.
  void sum() const;

 private:
  struct Tied {
    std::vector<at::Tensor> copies;      // leaf tensors on this rank
    std::shared_ptr<dist::Group> group;  // null: all copies are on this rank
    const char* name = "";
  };
  std::vector<Tied> tied_;
};

/// Memory for the messages of one step, reused across micro-batches: only as many buffers as are in use at
/// once.
class ReceiveBuffers {
 public:
  explicit ReceiveBuffers(at::Device device) : device_(device) {}

  /// Returns an uninitialized tensor without a graph. Its memory is reused only once no earlier tensor, view
  /// or saved variable of a graph refers to it.
  at::Tensor take(const TensorType& type) {
    for (const at::Tensor& buffer : buffers_)
      if (buffer.sizes() == type.sizes && buffer.scalar_type() == type.dtype && is_free(buffer))
        return buffer.variable_data();
    buffers_.push_back(at::empty(type.sizes, at::TensorOptions(device_).dtype(type.dtype)));
    return buffers_.back().variable_data();
  }

 private:
  // On the host, a backend's thread may have been the last to release the memory: the fence orders its
  // accesses before the next ones. On a GPU, all uses are queued before a release, and a receive starts after
  // queued work.
  static bool is_free(const at::Tensor& buffer) {
    if (buffer.storage().use_count() != 1) return false;
    std::atomic_thread_fence(std::memory_order_acquire);
    return true;
  }

  at::Device device_;
  std::vector<at::Tensor> buffers_;
};

/// A schedule, and the types of the tensors that enter its stages for one micro-batch.
struct ScheduleParts {
  pipeline::Schedule schedule;
  std::vector<TensorType> boundaries;
};

/// When one action of a step ran, by the host's steady clock.
struct ActionTime {
  pipeline::Action action;
  double start_s = 0;
  double end_s = 0;
  double waited_s = 0;  ///< time within it spent waiting for another rank's message
};

/// Runs schedules on the stages of one rank.
class PipelineRunner final : public StepRunner {
 public:
  /// `stages`: this rank's, in ascending order. `pp`: one axis.
  PipelineRunner(std::vector<Stage> stages, const DeviceMesh& pp, at::Device device);

  // ---- called by the trainer

  /// Sets the schedules of forward_backward() and forward(), on micro-batches of `micro_batch_rows`
  /// sequences. Collective over pp.
  void set_schedules(const ScheduleParts& training, const std::optional<ScheduleParts>& evaluation,
                     int64_t micro_batch_rows, TiedGradients tied);
  at::Tensor forward_backward(const std::vector<data::Batch>& batches,
                              const ops::ValidTokens& global_valid_tokens) override;
  at::Tensor forward(const data::Batch& batch, const ops::ValidTokens& global_valid_tokens) override;
  const std::vector<Stage>& models() const override { return stages_; }

  // ---- one schedule

  /// boundaries[s]: the type of the tensor that enters stage s (s >= 1) for one micro-batch. Throws
  /// ConfigError for a schedule of several stages that check_schedule() refuses, and Error if the schedule
  /// gives this rank other stages than the runner's. Collective over pp.
  StepPlan plan(const pipeline::Schedule& schedule, std::vector<TensorType> boundaries = {});
  /// Returns the loss as forward_backward() does; 0 on ranks without the last stage. An exception becomes an
  /// Error that names the action in which it occurred, and ends the pipeline: messages of that step may still
  /// be on the way, so further runs are refused.
  at::Tensor run(const StepPlan& plan, const std::vector<data::Batch>& micro_batches,
                 const ops::ValidTokens& global_valid_tokens);
  /// From now on each run() appends the times of its actions; null: it stops doing so. On a GPU these are the
  /// times when work was queued.
  void record_times(std::vector<ActionTime>* times) { times_ = times; }

 private:
  friend class RunningStep;
  int64_t local_stage(int index) const;
  void join_messages(StepPlan& plan, const pipeline::Schedule& schedule) const;
  StepPlan::Planned planned(const pipeline::Action& action, const pipeline::Schedule& schedule) const;
  std::string failure_of(const std::vector<StepPlan::Planned>& actions, size_t action,
                         const std::string& reason) const;

  std::vector<Stage> stages_;
  pipeline::Links links_;
  at::Device device_;
  BatchCopies copies_;
  std::optional<StepPlan> training_, evaluation_;
  int64_t micro_batch_rows_ = 0;
  TiedGradients tied_;
  std::vector<ScheduledSharding> shardings_;  // one per stage; empty while the hooks gather
  std::vector<ActionTime>* times_ = nullptr;
  bool failed_ = false;
};

}  // namespace titan::train

#pragma once

// One run of a pipeline's plan: what is in flight between its actions.

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/edge.h>

#include "titan/dist/collectives.h"
#include "train/pipeline/pipeline_runner.h"

namespace titan::train {

/// Where a backward starts: keeps a tensor's graph but not its memory, so a tensor that was sent needn't stay
/// for its backward.
class GraphRoot {
 public:
  GraphRoot() = default;
  explicit GraphRoot(const at::Tensor& output);
  /// The output doesn't require a gradient.
  bool empty() const { return !edge_.is_valid(); }
  /// From `grad`, of the output's shape and dtype; the graph is gone then.
  void backward(const at::Tensor& grad);

 private:
  torch::autograd::Edge edge_;
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

/// Local to PipelineRunner::run, so that an exception drops it all; calls on the wire aren't waited for then.
class RunningStep {
 public:
  RunningStep(PipelineRunner& runner, const StepPlan& plan, const std::vector<data::Batch>& micro_batches,
              int64_t global_valid_tokens);
  void perform(const StepPlan::Planned& due);
  void perform_timed(const StepPlan::Planned& due, std::vector<ActionTime>& times);
  /// Waits for what is on the wire; returns the loss.
  at::Tensor finish();

 private:
  /// One stage and micro-batch. The output of a stage's forward stays until it is sent, its input until the
  /// backward.
  struct Cell {
    at::Tensor input, output, grad_output, grad_input;
    std::shared_ptr<dist::Work> input_arrives, grad_arrives;  // with others' of the same call
    GraphRoot root;
    DelayedGradients delayed;
  };

  /// On the way to another rank.
  struct Sent {
    const pipeline::Link* way = nullptr;
    dist::Work work;
  };

  void forward(const StepPlan::Planned& due);
  void backward(const StepPlan::Planned& due);
  void backward_input(const StepPlan::Planned& due);
  void walk_graph(const StepPlan::Planned& due, Cell& cell);
  void send(const StepPlan::Planned& due, at::Tensor tensor);
  void drop_sent(const pipeline::Link* way);
  at::Tensor receive(const StepPlan::Planned& due, std::shared_ptr<dist::Work>& arrives);
  at::Tensor input_of(const StepPlan::Planned& due, Cell& cell);
  void await(const std::shared_ptr<dist::Work>& arrives);
  const data::Batch& batch_of(const StepPlan::Planned& due) const;
  at::Tensor on_device(const at::Tensor& host) const;
  bool is_last(const StepPlan::Planned& due) const { return due.action.stage + 1 == plan_.num_stages_; }
  ScheduledSharding* sharding_of(const StepPlan::Planned& due) const;

  PipelineRunner& runner_;
  const StepPlan& plan_;
  const std::vector<data::Batch>& micro_batches_;
  int64_t global_valid_tokens_;
  ReceiveBuffers buffers_;
  std::vector<Cell> cells_;
  std::vector<Sent> sends_;
  std::vector<at::Tensor> batch_;                      // messages for one call, until its last has come
  std::vector<std::shared_ptr<dist::Work>*> awaited_;  // of the cells that receive them
  double waited_s_ = 0;
  at::Tensor loss_;
};

}  // namespace titan::train

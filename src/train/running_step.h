#pragma once

// One run of a plan: what is in flight between its actions.

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/dist/collectives.h"
#include "titan/train/step_runner.h"
#include "train/graph_root.h"
#include "train/receive_buffers.h"

namespace titan::train {

/// Local to StepRunner::run, so that an exception drops it all; calls on the wire aren't waited for then.
class RunningStep {
 public:
  RunningStep(StepRunner& runner, const StepPlan& plan, const std::vector<data::Batch>& micro_batches,
              int64_t global_valid_tokens);
  void perform(const StepPlan::Planned& due);
  void perform_timed(const StepPlan::Planned& due, std::vector<ActionTime>& times);
  /// Waits for what is on the wire; returns the loss.
  at::Tensor finish();

 private:
  /// Of one stage and micro-batch. What a stage's forward gave stays until it is sent, its input until the
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

  StepRunner& runner_;
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

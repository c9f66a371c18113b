#pragma once

// Steps as CUDA graphs: a step is recorded once ([Note: work graphs]) and then launched, so that the host's share of a
// step doesn't grow with the model.
//
// A recording is good for one kind of step: the sizes of its batches and the number of valid tokens, which is an
// argument of the loss. The first steps of a kind run as usual, until everything that is made once is made:
// communication buffers, caches, NCCL's connections, the optimizer's state.
//
// It has two graphs, because the step before is judged between them, while the device works: forward, backward and
// clipping; then the optimizer's update. What changes from launch to launch is in memory on the device: the batches,
// the learning rates, whether the step is skipped. An optimizer whose rule takes its learning rate from the host
// updates the weights as usual.

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "dist/stream.h"
#include "titan/train/trainer.h"
#include "train/step_runner.h"

namespace titan::train {

class StepGraphs {
 public:
  /// Both must outlive it.
  StepGraphs(TrainerParts& parts, StepNumbers& numbers);
  ~StepGraphs();

  /// The same as the runner's forward_backward() and StepNumbers::clip(). The gradients must have been dropped.
  /// Throws Error if this model's step can't be recorded.
  ClippedStep run(int64_t step, const StepInput& input);
  /// The same as StepNumbers::update_weights(), for the step that run() ran last and returned `clipped` for.
  void update_weights(int64_t step, const ClippedStep& clipped);

 private:
  /// [valid tokens of all ranks, rows and length of each batch...]
  using Kind = std::vector<int64_t>;
  struct Recorded;

  static Kind kind_of(const StepInput& input);
  void reshard();
  ClippedStep run_as_usual(int64_t step, const StepInput& input);
  std::unique_ptr<Recorded> record(int64_t step, const StepInput& input);
  ClippedStep launch(Recorded& recorded, const StepInput& input);
  void record_update(int64_t step, Recorded& recorded);

  TrainerParts& parts_;
  StepNumbers& numbers_;
  dist::Stream copies_;            // [Note: copies of batches]
  std::map<Kind, int> num_steps_;  // before the recording
  std::map<Kind, std::unique_ptr<Recorded>> recorded_;
  Recorded* running_ = nullptr;  // launched by the last run(); null: that step ran as usual
  bool has_warned_ = false;
};

}  // namespace titan::train

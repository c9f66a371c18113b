#pragma once

// Steps as CUDA graphs: a step is recorded once ([Note: work graphs]) and then launched, so that the host's share of a
// step doesn't grow with the model.
//
// The first steps run as usual, until everything that is made once is made: communication buffers, caches, NCCL's
// connections, the optimizer's state. There is one recording. A step that it doesn't fit drops it and runs as usual; the
// next one is recorded anew. All ranks drop theirs together (Ballot::drops_graph), because NCCL wants a
// call either recorded on all ranks or on none.
//
// It has two graphs (train/recorded_step.h), because the step before is judged between them, while the device works. An optimizer whose
// rule takes its learning rate from the host updates the weights as usual.

#include <cstdint>
#include <memory>

#include "dist/stream.h"
#include "titan/train/trainer.h"
#include "train/step_runner.h"

namespace titan::train {

class StepGraphs {
 public:
  /// The first makes buffers and states, the second settles which of them are reused.
  static constexpr int kUsualSteps = 2;

  /// Both must outlive it.
  StepGraphs(TrainerParts& parts, StepNumbers& numbers);
  ~StepGraphs();

  /// False: the recording, if there is one, was made for batches of other sizes or with buffers that have grown since.
  bool can_launch(const std::vector<data::Batch>& batches) const;
  /// Before run(), if can_launch() was false on any rank.
  void drop(int64_t step);
  /// The same as the runner's forward_backward() and StepNumbers::clip(). The gradients must have been dropped.
  /// Throws Error if this model's step can't be recorded.
  ClippedStep run(int64_t step, const StepInput& input);
  /// The same as StepNumbers::update_weights(), for the step that run() ran last and returned `clipped` for.
  void update_weights(int64_t step, const ClippedStep& clipped);

 private:
  struct Recorded;

  std::unique_ptr<Recorded> record(int64_t step, const StepInput& input);

  TrainerParts& parts_;
  StepNumbers& numbers_;
  dist::Stream copies_;
  int num_usual_steps_ = 0;
  std::unique_ptr<Recorded> recorded_;  // null before the first launch
};

}  // namespace titan::train

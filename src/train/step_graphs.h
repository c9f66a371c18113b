#pragma once

// Steps as CUDA graphs: forward, backward and clipping are recorded once ([Note: work graphs]) and then launched
// as a whole, so that the host's share of a step doesn't grow with the model.
//
// A recording is good for one kind of step: the sizes of its batches and the number of valid tokens, which is an
// argument of the loss. The first steps of a kind run as usual, until everything that is made once is made:
// communication buffers, caches, NCCL's connections. The optimizer's step, whose learning rate changes, isn't
// part of the recording; it is a handful of launches.

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

 private:
  /// [valid tokens of all ranks, rows and length of each batch...]
  using Kind = std::vector<int64_t>;
  struct Recorded;

  static Kind kind_of(const StepInput& input);
  void reshard();
  ClippedStep run_as_usual(int64_t step, const StepInput& input);
  std::unique_ptr<Recorded> record(int64_t step, const StepInput& input);
  ClippedStep launch(Recorded& recorded, const StepInput& input);

  TrainerParts& parts_;
  StepNumbers& numbers_;
  dist::Stream copies_;            // [Note: copies of batches]
  std::map<Kind, int> num_steps_;  // before the recording
  std::map<Kind, std::unique_ptr<Recorded>> recorded_;
  bool has_warned_ = false;
};

}  // namespace titan::train

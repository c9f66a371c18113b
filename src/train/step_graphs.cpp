#include "train/step_graphs.h"

#include "dist/device_backend.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "train/recorded_step.h"

namespace titan::train {

struct StepGraphs::Recorded {
  Recorded(const TrainerParts& parts, const dist::Stream& copies)
      : step(parts.device, copies, parts.models, parts.parameters) {}

  // Whether all memory is there that the steps before had made and the graph uses.
  bool has_its_memory() const { return num_replaced == dist::num_replaced_memories(); }

  int64_t num_replaced = dist::num_replaced_memories();  // before it was recorded
  ClippedStep clipped;
  RecordedStep step;
};

StepGraphs::StepGraphs(TrainerParts& parts, StepNumbers& numbers)
    : parts_(parts), numbers_(numbers), copies_(dist::Stream::create(parts.device)) {}
StepGraphs::~StepGraphs() = default;

bool StepGraphs::can_launch(const std::vector<data::Batch>& batches) const {
  return !recorded_ || (recorded_->step.fits(batches) && recorded_->has_its_memory());
}

void StepGraphs::drop(int64_t step) {
  log::info_rank0(
      str("step ", step,
          " can't launch the CUDA graph, because its batches have other sizes or buffers have grown: "
          "it runs as usual, and the next step is recorded"));
  recorded_.reset();
  reshard(parts_.models);
  num_usual_steps_ = kUsualSteps - 1;
}

ClippedStep StepGraphs::run(int64_t step, const StepInput& input) {
  for (const data::Batch& batch : input.batches)
    TITAN_CHECK(!batch.document_end,
                "a step with attention within documents can't be recorded as a CUDA graph, because documents "
                "differ from step to step");
  if (num_usual_steps_ < kUsualSteps) {
    ++num_usual_steps_;
    return numbers_.clip(parts_.runner->forward_backward(input.batches, input.tokens.global));
  }
  if (!recorded_) recorded_ = record(step, input);
  recorded_->step.launch(input.batches, input.tokens.global);
  return recorded_->clipped;
}

std::unique_ptr<StepGraphs::Recorded> StepGraphs::record(int64_t step, const StepInput& input) {
  auto recorded = std::make_unique<Recorded>(parts_, copies_);
  recorded->step.record(step, input.batches,
                        [&](const std::vector<data::Batch>& batches, const ops::ValidTokens& tokens) {
                          recorded->clipped = numbers_.clip(parts_.runner->forward_backward(batches, tokens));
                        });
  log::info_rank0(
      str("step ", step, " is recorded as a CUDA graph, which further steps of the same sizes launch",
          parts_.optimizer.can_be_recorded()
              ? ""
              : ". The optimizer's part runs as usual: its rule takes the learning rate from the host"));
  return recorded;
}

void StepGraphs::update_weights(int64_t step, const ClippedStep& clipped) {
  if (!recorded_ || !parts_.optimizer.can_be_recorded()) return numbers_.update_weights(clipped);
  recorded_->step.update_weights(step, parts_.optimizer, recorded_->clipped.skip,
                                 recorded_->clipped.norm.factor);
}

}  // namespace titan::train

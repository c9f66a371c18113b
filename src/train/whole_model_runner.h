#pragma once

// [Note: whole-model step]
// Each batch runs forward and then backward, so that its activations are freed before the next batch starts.
// The loss of a batch is a sum over its tokens, divided by the tokens of the whole step on all ranks:
// gradients add up over batches and ranks without further weights. FSDP reduces them over ranks in the
// backward, and needs to know which batch is the last.

#include <vector>

#include "train/batch_copies.h"
#include "train/step_runner.h"

namespace titan::train {

/// Runs the whole model on each rank.
class WholeModelRunner final : public StepRunner {
 public:
  WholeModelRunner(TrainableModel& model, at::Device device)
      : models_{{&model}}, device_(device), copies_(device) {}
  at::Tensor forward_backward(const std::vector<data::Batch>& batches,
                              const ops::ValidTokens& global_valid_tokens) override;
  at::Tensor forward(const data::Batch& batch, const ops::ValidTokens& global_valid_tokens) override;
  const std::vector<ModelPart>& models() const override { return models_; }

 private:
  void set_documents(const data::Batch& batch);

  std::vector<ModelPart> models_;
  at::Device device_;
  BatchCopies copies_;
};

}  // namespace titan::train

#pragma once

// [Note: whole-model step]
// Each batch runs forward and then backward, so that its activations are freed before the next batch starts.
// The loss of a batch is a sum over its tokens, divided by the tokens of the whole step on all ranks:
// gradients add up over batches and ranks without further weights. FSDP reduces them over ranks in the
// backward, and needs to know which batch is the last.
//
// [Note: copies of batches]
// Batches come from page-locked memory. When that is freed, on any thread, LibTorch records an event on each stream
// that used it. A stream whose work is being recorded as a graph doesn't allow that, so copies have a stream of their own.

#include <vector>

#include "dist/stream.h"
#include "train/step_runner.h"

namespace titan::train {

/// Runs the whole model on each rank.
class WholeModelRunner final : public StepRunner {
 public:
  WholeModelRunner(TrainableModel& model, at::Device device)
      : models_{{&model}}, device_(device), copies_(dist::Stream::create(device)) {}
  at::Tensor forward_backward(const std::vector<data::Batch>& batches, int64_t global_valid_tokens) override;
  at::Tensor forward(const data::Batch& batch, int64_t global_valid_tokens) override;
  const std::vector<ModelPart>& models() const override { return models_; }

 private:
  at::Tensor on_device(const at::Tensor& host) const;

  std::vector<ModelPart> models_;
  at::Device device_;
  dist::Stream copies_;  // [Note: copies of batches]
};

}  // namespace titan::train

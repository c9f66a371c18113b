#pragma once

// Forward and backward of one optimizer step.

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/data/loader.h"
#include "titan/train/model_spec.h"

namespace titan::train {

/// A model that this rank runs. It outlives the runner.
struct ModelPart {
  TrainableModel* model = nullptr;
  int index = 0;  ///< its place among the parts of the whole model; 0: it is the whole model
};

class StepRunner {
 public:
  virtual ~StepRunner() = default;
  /// Runs forward and backward of each batch. Returns this rank's share of the step's loss, the sum over its
  /// valid tokens divided by the global count, as a float64 scalar on the device: reading it waits for a GPU.
  /// When it returns, the gradients of the whole step are reduced. `global_valid_tokens` must be positive.
  /// After an exception the next call starts afresh.
  virtual at::Tensor forward_backward(const std::vector<data::Batch>& batches,
                                      int64_t global_valid_tokens) = 0;
  /// Runs the forward of one batch, without gradients; returns the loss as above.
  virtual at::Tensor forward(const data::Batch& batch, int64_t global_valid_tokens) = 0;
  virtual const std::vector<ModelPart>& models() const = 0;
};

/// The whole model on each rank.
class OneStageRunner final : public StepRunner {
 public:
  OneStageRunner(TrainableModel& model, at::Device device) : models_{{&model}}, device_(device) {}
  at::Tensor forward_backward(const std::vector<data::Batch>& batches, int64_t global_valid_tokens) override;
  at::Tensor forward(const data::Batch& batch, int64_t global_valid_tokens) override;
  const std::vector<ModelPart>& models() const override { return models_; }

 private:
  at::Tensor on_device(const at::Tensor& host) const;

  std::vector<ModelPart> models_;
  at::Device device_;
};

/// What every runner is asked for: throws Error for a step without valid tokens.
void check_valid_tokens(int64_t global_valid_tokens);

}  // namespace titan::train

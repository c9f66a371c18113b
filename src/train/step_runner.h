#pragma once

// One optimizer step: what all ranks agree on before it (how many labels count, and whether they make the
// step at all), and its forward and backward.
//
// The votes ride on the exchange of token counts, which every step needs anyway; it is between ranks that
// read different rows. Ranks that share rows (tensor, context, pipeline parallel) exchange nothing by then,
// so where there are such axes one number goes along each of them too.

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/data/loader.h"
#include "titan/train/model_spec.h"
#include "titan/train/parallel_dims.h"
#include "titan/train/policy.h"

namespace titan::train {

struct Agreement {
  TokenCounts tokens;
  Vote vote = Vote::Go;  ///< the highest of all ranks
};

/// `batches`: this rank's of the step, whole rows. Collective over the world.
Agreement agree(const std::vector<data::Batch>& batches, Vote mine, const Meshes& meshes);

/// The counts alone. `batch_mesh`: the ranks that read different rows.
TokenCounts count_valid_tokens(const std::vector<data::Batch>& batches, const DeviceMesh& batch_mesh);

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

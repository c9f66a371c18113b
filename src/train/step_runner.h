#pragma once

// One optimizer step: what all ranks agree on before it (how many labels count, and whether they make the
// step at all), its forward and backward, and its numbers.
//
// The votes ride on the exchange of token counts, which every step needs anyway; it is between ranks that
// read different rows. Ranks that share rows (tensor, context, pipeline parallel) exchange nothing by then,
// so where there are such axes one number goes along each of them too.

#include <cstdint>
#include <memory>
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

/// Throws Error unless global_valid_tokens > 0. Every runner calls it.
void check_valid_tokens(int64_t global_valid_tokens);

/// Brings a step's loss and gradient norm to the host. If they are read at once, the host waits for the device
/// in every step. If they are read late, it doesn't: the device itself skips the update of a step that isn't
/// finite, and the host reads the numbers when the next step's work is queued.
class StepNumbers {
 public:
  virtual ~StepNumbers() = default;
  /// Clips the gradients by their norm over all ranks, and exchanges whether the losses are finite. `loss`:
  /// of this rank, a double scalar on the device. Collective over the world.
  virtual void clip(int64_t step, const at::Tensor& loss) = 0;
  /// Steps the optimizer, unless the numbers of the step that was clipped last aren't finite.
  virtual void update_weights() = 0;
  /// Waits for the device. Returns the numbers of the step that was clipped last; if they are late, those of
  /// the step that was updated last.
  virtual StepValues read() = 0;
  virtual bool are_late() const = 0;
};

/// `parts` outlive the result.
std::unique_ptr<StepNumbers> make_step_numbers(TrainerParts& parts, double max_norm, bool late);

/// For a step without labels.
StepValues no_values(int64_t step);

}  // namespace titan::train

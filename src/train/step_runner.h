#pragma once

// One optimizer step: the agreement before it (the number of valid labels, and whether to make the step at
// all), its forward and backward, and its numbers.
//
// The votes travel with the token counts, which all ranks exchange in every step anyway. So do a logged step's
// numbers of each rank, and the figures of observers.

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/data/loader.h"
#include "titan/optim/clip.h"
#include "titan/train/model_spec.h"
#include "titan/train/parallel_dims.h"
#include "titan/train/policy.h"

namespace titan::train {

/// A rank's part of an agreement.
struct Ballot {
  Vote vote = Vote::Go;
  bool drops_graph = false;                 ///< StepGraphs::can_launch is false here
  std::optional<int64_t> tokens_seen = {};  ///< by this rank's rows up to this step, if it is logged
  std::vector<double> figures = {};         ///< for all ranks to see; equally many on each
};

struct Agreement {
  TokenCounts tokens;
  Vote vote = Vote::Go;              ///< the highest vote of all ranks
  bool drops_graph = false;          ///< on any rank, and therefore on all
  std::vector<double> figures = {};  ///< those of all ranks, in the order of ranks
};

/// `batches`: this rank's batches of the step, in whole rows. One exchange between hosts, collective over the world.
Agreement agree(const std::vector<data::Batch>& batches, const Ballot& mine, const Meshes& meshes,
                const dist::World& world);

/// A step's numbers, over all ranks.
struct StepSums {
  double loss = 0;
  /// The highest mean over the valid tokens of one rank's rows; `loss` if no rank has any.
  double max_loss = 0;
  int64_t tokens_seen = 0;
};

/// `losses`: StepValues::losses, of a step that is logged. Exchanges nothing.
StepSums sum_over_ranks(const std::vector<double>& losses, const TokenCounts& tokens);

/// A model that this rank runs. It must outlive the runner.
struct ModelPart {
  TrainableModel* model = nullptr;
  int index = 0;  ///< among the parts of the whole model; 0 for the whole model itself
};

class StepRunner {
 public:
  virtual ~StepRunner() = default;
  /// Runs forward and backward of each batch. Returns this rank's share of the step's loss, the sum over its
  /// valid tokens divided by the global count, as a float64 scalar on the device: reading it waits for a GPU.
  /// When it returns, the gradients of the whole step are reduced. `global_valid_tokens` must be positive.
  /// After an exception, the next call starts afresh.
  virtual at::Tensor forward_backward(const std::vector<data::Batch>& batches,
                                      const ops::ValidTokens& global_valid_tokens) = 0;
  /// Runs the forward of one batch, without gradients; returns the loss as above.
  virtual at::Tensor forward(const data::Batch& batch, const ops::ValidTokens& global_valid_tokens) = 0;
  virtual const std::vector<ModelPart>& models() const = 0;
};

/// Throws Error if there are none. Every runner calls it.
void check_valid_tokens(const ops::ValidTokens& global_valid_tokens);
/// The documents of a batch for TrainableModel::set_documents, in host memory from which a copy to `device` is
/// asynchronous; none without Batch::document_end.
ops::Documents documents_of(const data::Batch& batch, at::Device device);
/// model.loss(), checked: throws Error unless it is a scalar in float32 or float64.
at::Tensor checked_loss(TrainableModel& model, const at::Tensor& input, const at::Tensor& labels_BS,
                        const ops::ValidTokens& global_valid_tokens);

/// A step after clipping: device tensors that the host hasn't read.
struct ClippedStep {
  at::Tensor loss, flag;  ///< double scalars: this rank's loss; above 0 if any rank's isn't finite
  at::Tensor skip;        ///< fp32 scalar: 1 if the step isn't finite
  optim::LaunchedGradNorm norm;
};

/// Brings a step's loss and gradient norm to the host. If they are read at once, the host waits for the
/// device in every step. If they are read late, it doesn't: the device itself skips the update of a step that
/// isn't finite, and the host reads the numbers when the next step's work is queued.
class StepNumbers {
 public:
  virtual ~StepNumbers() = default;
  /// `has_losses`: all ranks get the losses of all ranks.
  void begin(int64_t step, bool has_losses) {
    step_ = step;
    has_losses_ = has_losses;
  }
  /// Clips the gradients by their norm over all ranks, and exchanges whether the losses are finite. If the numbers
  /// are read late, update_weights() multiplies the gradients, because the optimizer can do that in its own pass.
  /// `loss`: this rank's, a double scalar on the device. Collective over the world.
  virtual ClippedStep clip(const at::Tensor& loss) = 0;
  /// Steps the optimizer, unless the step's numbers aren't finite.
  virtual void update_weights(const ClippedStep& clipped) = 0;
  /// Called after the update: if the numbers are read late, queues their way to the host. Collective over the world.
  virtual void send(const ClippedStep& clipped) = 0;
  /// Waits for the device. Returns the numbers of the step that was clipped last or, if they are read late,
  /// of the step that was sent last.
  virtual StepValues read() = 0;
  virtual bool are_late() const = 0;

 protected:
  int64_t step_ = 0;
  bool has_losses_ = false;
};

/// `parts` must outlive the result.
std::unique_ptr<StepNumbers> make_step_numbers(TrainerParts& parts, double max_norm, bool late);

/// The numbers of a step without labels.
StepValues no_values(int64_t step, int world_size);

}  // namespace titan::train

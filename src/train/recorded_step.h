#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "dist/stream.h"
#include "dist/work_graph.h"
#include "titan/data/loader.h"
#include "titan/optim/optimizer.h"
#include "titan/train/model_spec.h"

namespace titan::train {

/// The device work of a step as two CUDA graphs: forward, backward and clipping; then the optimizer's update. What changes from launch to
/// launch is in memory on the device: the batches, their number of valid tokens, the learning rates, whether the step is skipped.
class RecordedStep {
 public:
  /// The work that is recorded first, with gradients enabled: forward and backward of these batches, which are on the device, then clipping.
  using Work = std::function<void(const std::vector<data::Batch>& batches, const ops::ValidTokens& tokens)>;

  /// Both lists must outlive it. `copies`: a stream that nothing else uses ([Note: copies of batches]); recordings that follow each other may share
  /// it.
  RecordedStep(at::Device device, const dist::Stream& copies,
               const std::vector<std::unique_ptr<TrainableModel>>& models,
               const std::vector<Parameter>& parameters);

  /// For batches of these sizes. The gradients must have been dropped. Throws Error, which names the step, if the work can't be recorded.
  void record(int64_t step, const std::vector<data::Batch>& batches, const Work& work);
  /// Whether launch() can read these batches.
  bool fits(const std::vector<data::Batch>& batches) const;
  /// Queues what was recorded, for these batches. The parameters then have the recorded gradients.
  void launch(const std::vector<data::Batch>& batches, int64_t global_valid_tokens);
  /// Queues the update of an optimizer that can_be_recorded(), which the first call records; both tensors are the recorded work's.
  void update_weights(int64_t step, optim::Optimizer& optimizer, const at::Tensor& skip,
                      const at::Tensor& factor);

 private:
  at::Device device_;
  const std::vector<std::unique_ptr<TrainableModel>>& models_;
  const std::vector<Parameter>& parameters_;
  dist::Stream copies_;
  at::Tensor inverse_tokens_;  // ops::ValidTokens::on_device
  std::vector<data::Batch> batches_;
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_;  // parameter, its gradient
  dist::WorkGraph graph_, update_;  // destroyed first: they wait until their last launch has ended
  bool has_update_ = false;
};

/// Shards what a validation may have left gathered, in memory that a launch uses, or that a recording would use and FSDP would free later.
void reshard(const std::vector<std::unique_ptr<TrainableModel>>& models);

}  // namespace titan::train

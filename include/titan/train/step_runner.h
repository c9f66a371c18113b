#pragma once

// [Note: one step runner]
// A schedule is the list of what this rank does in one optimizer step: F (forward) and B (backward) of
// numbered micro-batches. Without a pipeline it is one stage's: F0 B0 F1 B1 ...; a pipeline's are other lists
// for the same runner. Accumulation, token counts and the moment at which gradients are reduced exist here
// once, and nowhere else.

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/data/loader.h"
#include "titan/dist/device_mesh.h"
#include "titan/train/model_spec.h"

namespace titan::train {

struct Action {
  enum class Kind { Forward, Backward };
  Kind kind = Kind::Forward;
  int micro_batch = 0;
  friend bool operator==(const Action&, const Action&) = default;
};
using Schedule = std::vector<Action>;

/// F0 B0 F1 B1 ...: each micro-batch's activations are gone before the next one starts.
Schedule one_stage_schedule(int num_micro_batches);
/// F0 F1 ...: evaluation.
Schedule forward_schedule(int num_micro_batches);

/// What counts in a step: labels that aren't -100.
struct TokenCounts {
  int64_t local = 0;   ///< in this rank's rows, over its micro-batches
  int64_t global = 0;  ///< in the rows of all ranks
};

/// Whole rows are counted, before context parallelism cuts them: `batch_mesh` is of the ranks that read
/// different ones.
TokenCounts count_valid_tokens(const std::vector<data::Batch>& micro_batches, const DeviceMesh& batch_mesh);

/// Runs schedules on one model.
class StepRunner {
 public:
  StepRunner(TrainableModel& model, at::Device device) : model_(model), device_(device) {}

  /// Runs `schedule`. Returns this rank's share of the step's loss, sum over its valid tokens / global count,
  /// as a float64 scalar on the model's device (reading it waits for a GPU). After the last Backward the
  /// gradients of the whole step are reduced. `global_valid_tokens` must be positive.
  at::Tensor run(const Schedule& schedule, const std::vector<data::Batch>& micro_batches,
                 int64_t global_valid_tokens);

 private:
  at::Tensor forward(const data::Batch& micro_batch, int64_t global_valid_tokens);
  void backward(at::Tensor& loss, bool last);

  TrainableModel& model_;
  at::Device device_;
};

}  // namespace titan::train

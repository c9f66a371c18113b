#pragma once

// The update of Adam and AdamW over lists of tensors, in three implementations with equal results up to
// rounding.

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "param_groups.h"

namespace titan::optim {

/// Parallel lists: entry i of each belongs to one parameter. One device, one dtype, one AdamOptions.
struct AdamLists {
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> grads;
  std::vector<at::Tensor> exp_avgs;
  std::vector<at::Tensor> exp_avg_sqs;
  std::vector<at::Tensor> steps;  ///< fp32 scalars; on the host unless the implementation is fused
};

enum class WeightDecay {
  InGradient,  ///< Adam
  Decoupled,   ///< AdamW
};

/// Updates params, exp_avgs and exp_avg_sqs from grads. `steps` count this update already. The fused one may
/// not touch grads; nor do the others.
using AdamStep = void (*)(const AdamLists& lists, const AdamOptions& options, WeightDecay decay);

/// Does nothing where `skip` (an fp32 scalar on the device, or undefined) is 1.
void fused_adam_step_unless(const at::Tensor& skip, const AdamLists& lists, const AdamOptions& options,
                            WeightDecay decay);
void fused_adam_step(const AdamLists& lists, const AdamOptions& options, WeightDecay decay);
void foreach_adam_step(const AdamLists& lists, const AdamOptions& options, WeightDecay decay);
void for_loop_adam_step(const AdamLists& lists, const AdamOptions& options, WeightDecay decay);

}  // namespace titan::optim

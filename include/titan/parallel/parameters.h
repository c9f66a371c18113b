#pragma once

// The list of parameters that optimizer, clipping and checkpoints use.
//
//   titan::materialize(model, /*seed=*/1);
//   const std::vector<titan::Parameter> parameters = titan::parameters(model);
//   titan::optim::Optimizer optimizer(parameters, {.lr = 1e-3});

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/nn/hooks.h"
#include "titan/tensor/dtensor.h"

namespace titan {

/// A parameter as this rank owns it.
struct Parameter {
  /// Dotted, as TorchTitan's. For a tied parameter, its first name in registration order, even if a pipeline
  /// stage has only another of its uses.
  std::string name;
  DTensor data;  ///< data.local is the leaf that the optimizer writes; its gradient is data.local.grad()
  at::Tensor compute;  ///< the tensor that modules use; without fully_shard the same as data.local
  nn::Init init;       ///< as declared by its module
  bool has_init = false;
  /// Another pipeline stage has a copy (tied weights). Copies are equal at the start, and stay equal if the
  /// gradients of both are summed before the optimizer step.
  bool on_other_stages = false;
  /// An earlier stage has the copy that counts in norms and files, where each parameter must count once.
  bool duplicate = false;
};

/// All parameters below `root` in registration order, tied ones once.
std::vector<Parameter> parameters(const nn::AnyRef& root);

/// Allocates and draws this rank's part of every deferred parameter, and fills the buffers. Values depend
/// only on `seed`, the parameter's name and the global index. Parameters that have values already keep them.
void materialize(const nn::AnyRef& root, uint64_t seed);

}  // namespace titan

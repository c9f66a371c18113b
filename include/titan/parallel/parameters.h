#pragma once

// The list of parameters that optimizer, clipping and checkpoints use.

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/nn/hooks.h"
#include "titan/tensor/dtensor.h"

namespace titan {

/// A parameter as this rank owns it.
struct Parameter {
  std::string name;  ///< dotted, as TorchTitan's; of a tied parameter the first in registration order, also
                     ///< where a pipeline stage has another of its uses only
  DTensor data;      ///< data.local is the leaf that the optimizer writes; its gradient is data.local.grad()
  at::Tensor compute;  ///< what the modules use; the same tensor as data.local without fully_shard
  nn::Init init;       ///< as declared by its module
  bool has_init = false;
  /// Another pipeline stage has a copy (tied weights). Copies are equal at the start, and stay equal if the
  /// gradients of both are summed before the optimizer's step.
  bool on_other_stages = false;
  /// An earlier stage has the copy that counts where each parameter counts once: in norms and files.
  bool duplicate = false;
};

/// All parameters below `root` in registration order, tied ones once.
std::vector<Parameter> parameters(const nn::AnyRef& root);

/// Allocates and draws what this rank owns of every deferred parameter, and fills the buffers. Values depend
/// on `seed`, the parameter's name and global index alone. Parameters that have values already keep them.
void materialize(const nn::AnyRef& root, uint64_t seed);

}  // namespace titan

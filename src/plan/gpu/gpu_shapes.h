#pragma once

// Sizes of the results of operations that LibTorch has for GPUs only, and the choice of an attention kernel there.

#include <string>

#include <ATen/core/Tensor.h>

#include "plan/gpu/shapes.h"

namespace titan::plan {

/// As shape_rule(), by the operator's name and overload: "aten::mm.dtype". Results that hold no values of the device are tensors of
/// the host.
const ShapeRule* gpu_shape_rule(const std::string& name);

/// at::SDPBackend, as LibTorch 2.11 chooses on a GPU of this compute capability.
int64_t attention_backend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool is_causal,
                          bool is_grouped, int64_t compute_capability);

}  // namespace titan::plan

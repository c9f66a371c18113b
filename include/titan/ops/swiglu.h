#pragma once

#include <ATen/core/Tensor.h>

namespace titan::ops {

/// silu(gate) * up, elementwise, of two tensors of one shape and dtype (Shazeer, "GLU variants improve
/// transformer", 2020). Keeps the two inputs and nothing else for its backward. Computed in fp32 (float64 of
/// float64), rounded once. First derivatives only.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

}  // namespace titan::ops

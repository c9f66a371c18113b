#pragma once

#include <ATen/core/Tensor.h>

namespace titan::ops {

/// Rotates each pair of features (2i, 2i+1) of a token at position p by the angle whose (cos, sin) is
/// table[p, 2i..2i+1] (Su et al., RoFormer, interleaved). x: [B, S, H, D]; table: [P, D], fp32 or float64;
/// positions: int64 [S] or [B, S], or undefined for 0..S-1. Computed in fp32 (float64 of float64) and rounded
/// once. A position outside the table is an error on CPUs. Differentiable (once) in x.
at::Tensor rotary(const at::Tensor& x_BSHD, const at::Tensor& table_PD, const at::Tensor& positions = {});

}  // namespace titan::ops

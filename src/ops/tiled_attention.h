#pragma once

#include "ops/attention_kernels.h"

namespace titan::ops {

/// Attention from LibTorch's products, a tile of keys at a time: for what no fused kernel takes (float64 on a
/// GPU, heads of odd sizes). Arguments as of run_attention_kernel and its backward.
KernelResult tiled_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal);
KernelGradients tiled_attention_backward(const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k,
                                         const at::Tensor& v, const at::Tensor& out,
                                         const at::Tensor& log_sum_exp, bool causal);

}  // namespace titan::ops

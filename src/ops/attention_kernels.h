#pragma once

// LibTorch's attention kernels that give and take the log-sum-exp, behind one signature. Heads first:
// q [B, H, S, D]; k, v [B, K, T, D]; log_sum_exp [B, H, S], natural, in fp32 (float64 of float64).

#include <ATen/core/Tensor.h>

namespace titan::ops {

struct KernelResult {
  at::Tensor out, log_sum_exp;
};
struct KernelGradients {
  at::Tensor q, k, v;
};

/// All keys, or `causal`: query i sees the keys 0..i.
KernelResult run_attention_kernel(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal);

/// `out` and `log_sum_exp` may be of more keys than these.
KernelGradients run_attention_kernel_backward(const at::Tensor& grad, const at::Tensor& q,
                                              const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                                              const at::Tensor& log_sum_exp, bool causal);

}  // namespace titan::ops

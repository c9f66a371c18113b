#pragma once

#include <ATen/core/Tensor.h>

namespace titan::ops {

/// softmax(q k^T / sqrt(D)) v with a causal mask. q: [B, S, H, D]; k, v: [B, S, K, D], H a multiple of K
/// (query head h reads key head h / (H/K)). Result: [B, S, H, D], in q's dtype. First derivatives only.
///
/// On CPUs by a kernel of ours in fp32 (bf16 too, where LibTorch's products of 16-bit matrices are slow),
/// otherwise by LibTorch's flash kernels.
at::Tensor causal_attention(const at::Tensor& q_BSHD, const at::Tensor& k_BSKD, const at::Tensor& v_BSKD);

}  // namespace titan::ops

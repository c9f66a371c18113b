#pragma once

#include <ATen/core/Tensor.h>

namespace titan::ops {

/// softmax(q k^T / sqrt(D)) v with a causal mask, by LibTorch's flash kernels. q: [B, S, H, D]; k, v: [B, S,
/// K, D], H a multiple of K (query head h reads key head h / (H/K)). Result: [B, S, H, D], in q's dtype.
/// First derivatives only.
///
/// On CPUs without AVX-512, bf16 and fp16 are computed in fp32: LibTorch's products of 16-bit matrices are
/// several times slower there.
at::Tensor causal_attention(const at::Tensor& q_BSHD, const at::Tensor& k_BSKD, const at::Tensor& v_BSKD);

}  // namespace titan::ops

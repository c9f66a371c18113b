#pragma once

#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

#include "titan/ops/products.h"

namespace titan::ops {

/// Rows of weight [V, D] by tokens [...] (int64 in [0, V), others are an error on CPUs): [..., D]. The
/// weight's gradient is summed in fp32 (float64 of a float64 weight), in token order, and goes to
/// `weight_sink` if there is one. With `part`, weight holds these rows of a larger vocabulary, and tokens of
/// other parts give zeros: the sum over the parts is the embedding. First derivatives only.
at::Tensor embedding(const at::Tensor& weight_VD, const at::Tensor& tokens,
                     const std::shared_ptr<GradSink>& weight_sink = nullptr, const VocabularyPart& part = {});

/// x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019). x: [..., D];
/// weight: [D]. Computed in fp32 (float64 of float64) and rounded once to x's dtype. The weight's gradient is
/// summed in fp32 in an order that doesn't depend on the number of threads, in the pass that makes x's, and
/// goes to `weight_sink` if there is one. First derivatives only.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight_D, double eps,
                    const std::shared_ptr<GradSink>& weight_sink = nullptr);

/// Rotates each pair of features (2i, 2i+1) of a token at position p by the angle whose (cos, sin) is
/// table[p, 2i..2i+1] (Su et al., RoFormer, interleaved). x: [B, S, H, D]; table: [P, D], fp32 or float64;
/// positions: int64 [S] or [B, S], or undefined for 0..S-1. Computed in fp32 (float64 of float64) and rounded
/// once. A position outside the table is an error on CPUs. Differentiable (once) in x.
at::Tensor rotary(const at::Tensor& x_BSHD, const at::Tensor& table_PD, const at::Tensor& positions = {});

/// silu(gate) * up, elementwise, of two tensors of one shape and dtype (Shazeer, "GLU variants improve
/// transformer", 2020). Keeps the two inputs and nothing else for its backward. Computed in fp32 (float64 of
/// float64), rounded once. First derivatives only.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

/// softmax(q k^T / sqrt(D)) v with a causal mask. q: [B, S, H, D]; k, v: [B, S, K, D], H a multiple of K
/// (query head h reads key head h / (H/K)). Result: [B, S, H, D], in q's dtype. First derivatives only.
///
/// On CPUs by a kernel of ours in fp32 (bf16 too, where LibTorch's products of 16-bit matrices are slow),
/// otherwise by LibTorch's flash kernels.
at::Tensor causal_attention(const at::Tensor& q_BSHD, const at::Tensor& k_BSKD, const at::Tensor& v_BSKD);

// [Note: attention in parts]
// The keys of a sequence may come in parts, in any order: softmax over all of them is had from the results
// over each, out_i and lse_i = log(sum(exp(score))), as
//   lse = log(sum_i exp(lse_i))    out = sum_i exp(lse_i - lse) out_i
// attend() adds a part to such a sum; never is there more of the scores than a small block. The backward of a
// part needs nothing of the others but the sum: the probabilities are exp(score - lse) with the lse of all
// keys, and what softmax subtracts is dO . O with the O of all keys.

/// Attention over the keys that were added so far.
struct AttentionSum {
  at::Tensor out_BSHD;         ///< fp32, or float64 of float64, whatever the dtype of the parts
  at::Tensor log_sum_exp_BHS;  ///< the same dtype; -inf: no key yet

  /// Zeros and -inf, for the queries `q`.
  static AttentionSum of_no_keys(const at::Tensor& q_BSHD);
  /// The same memory, of the queries first .. first + count.
  AttentionSum rows(int64_t first, int64_t count) const;
};

/// Adds the keys k, values v [B, T, K, D] to what the queries q [B, S, H, D] have seen. Query i sees the keys
/// 0 .. first_query + i of these (first_query >= 0): 0 is a causal mask, T - 1 and above is none. Where
/// LibTorch's kernels compute (CUDA; float64, some bf16), a mask in between has to end on a square:
/// first_query + S <= T. Features adjacent (stride 1), all else in any strides. Not recorded by autograd.
void attend(const AttentionSum& sum, const at::Tensor& q_BSHD, const at::Tensor& k_BTKD,
            const at::Tensor& v_BTKD, int64_t first_query);

/// Gradients that parts are added to, in fp32 (float64 of float64).
struct AttentionGradients {
  at::Tensor q_BSHD, k_BTKD, v_BTKD;
  static AttentionGradients zeros(const at::Tensor& q_BSHD, const at::Tensor& k_BTKD);
};

/// Adds what the keys of one attend() contribute to `grads`: `grad` is that of the whole result, `out` (q's
/// dtype) and `log_sum_exp` are those of all keys.
void attend_backward(const AttentionGradients& grads, const at::Tensor& grad_BSHD, const at::Tensor& q_BSHD,
                     const at::Tensor& k_BTKD, const at::Tensor& v_BTKD, const at::Tensor& out_BSHD,
                     const at::Tensor& log_sum_exp_BHS, int64_t first_query);

}  // namespace titan::ops

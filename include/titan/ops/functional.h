#pragma once

// The operations of a transformer besides linear layers and the loss, as functions on tensors with first
// derivatives only. They compute in fp32 (float64 for float64 inputs) and round once.
//
//   at::Tensor h = ops::rms_norm(ops::embedding(weight, tokens), scale, 1e-5);

#include <utility>

#include "titan/ops/documents.h"
#include "titan/ops/linear.h"

namespace titan::ops {

/// Looks up rows of weight [V, D] by tokens [...], int64 in [0, V); result: [..., D]. CPUs report other
/// tokens as an error. The weight's gradient is summed in fp32 (float64 for a float64 weight), in token
/// order, and goes to `weight_sink` if there is one. With `part`, weight has those rows of a larger
/// vocabulary and tokens of other parts give zeros: the sum over the parts is the embedding.
at::Tensor embedding(const at::Tensor& weight_VD, const at::Tensor& tokens,
                     const std::shared_ptr<GradSink>& weight_sink = nullptr, const VocabularyPart& part = {});

/// x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019). x: [..., D];
/// weight: [D]. The weight's gradient is computed together with x's and goes to `weight_sink` if there is
/// one. The order of its sum doesn't depend on the number of threads.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight_D, double eps,
                    const std::shared_ptr<GradSink>& weight_sink = nullptr);

/// The norm of a residual stream, and the stream itself for its other users.
struct NormedSum {
  at::Tensor normed, sum;
  template <class Visit>
  void for_each_tensor(Visit&& visit) {
    visit(normed);
    visit(sum);
  }
};
/// sum = x + added, or x if `added` is undefined; normed = rms_norm(sum). x and added have one shape and dtype. A user of
/// x besides its norm takes `sum`: the norm's backward then adds both gradients of x. On a GPU each direction is
/// one kernel.
NormedSum add_rms_norm(const at::Tensor& x, const at::Tensor& added, const at::Tensor& weight_D, double eps,
                       const std::shared_ptr<GradSink>& weight_sink = nullptr);

/// Rotates each pair of features (2i, 2i+1) of a token at position p by the angle whose (cos, sin) is
/// table[p, 2i..2i+1] (Su et al., RoFormer, interleaved). x: [B, S, H, D]; table: [P, D], fp32 or float64;
/// positions: int64 [S] or [B, S], undefined for 0..S-1. CPUs report a position outside the table as an
/// error. Differentiable in x.
at::Tensor rotary(const at::Tensor& x_BSHD, const at::Tensor& table_PD, const at::Tensor& positions = {});
/// The same for queries and keys, which may differ in their number of heads: one kernel on a GPU.
std::pair<at::Tensor, at::Tensor> joint_rotary(const at::Tensor& q_BSHD, const at::Tensor& k_BSKD,
                                               const at::Tensor& table_PD, const at::Tensor& positions = {});

/// silu(gate) * up, elementwise, for two tensors of one shape and dtype (Shazeer, "GLU variants improve
/// transformer", 2020). Keeps only the two inputs for its backward.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

/// softmax(q k^T / sqrt(D)) v with a causal mask. q: [B, S, H, D]; k, v: [B, S, K, D], H a multiple of K
/// (query head h reads key head h / (H/K)). Result: [B, S, H, D], in q's dtype. With `documents`, whose starts
/// are on q's device, a query sees only the keys of its own document.
///
/// Computed on CPUs by our own kernel in fp32 (and in bf16 if LibTorch's products of 16-bit matrices are
/// slow, or within documents), otherwise by LibTorch's flash kernels.
at::Tensor causal_attention(const at::Tensor& q_BSHD, const at::Tensor& k_BSKD, const at::Tensor& v_BSKD,
                            const Documents& documents = {});

// [Note: attention in parts]
// The keys of a sequence may be processed in parts, in any order. Softmax over all keys follows from the
// results over each part, out_i and lse_i = log(sum(exp(score))), as
//   lse = log(sum_i exp(lse_i))    out = sum_i exp(lse_i - lse) out_i
// attend() adds a part to such a sum; only a small block of the scores exists at a time. The backward of a
// part needs only the sum from the other parts: the probabilities are exp(score - lse) with the lse of all
// keys, and softmax's backward subtracts dO . O with the O of all keys.

/// Queries [B, S, H, D] with keys and values [B, T, K, D], or their gradients.
struct QueriesKeysValues {
  at::Tensor q, k, v;
};

/// Attention over the keys added so far.
struct AttentionSum {
  at::Tensor out_BSHD;         ///< fp32, or float64 if the parts are float64
  at::Tensor log_sum_exp_BHS;  ///< the same dtype; -inf: no keys yet

  /// Zeros and -inf, for the queries `q`.
  static AttentionSum of_no_keys(const at::Tensor& q_BSHD);
  /// A view of the queries first .. first + count.
  AttentionSum rows(int64_t first, int64_t count) const;
};

/// Adds the attention of the queries of `in` over its keys to `sum`. Query i sees its keys 0 .. first_query +
/// i (first_query >= 0): 0 is a causal mask, T - 1 and above is none. If LibTorch's kernels compute (CUDA;
/// float64, some bf16), a mask in between must end in a square: first_query + S <= T. Features must be
/// adjacent (stride 1); other strides are free. Not recorded by autograd.
void attend(const AttentionSum& sum, const QueriesKeysValues& in, int64_t first_query);

/// Sums of the parts' gradients, in fp32 (float64 for float64).
struct AttentionGradients {
  at::Tensor q_BSHD, k_BTKD, v_BTKD;
  static AttentionGradients zeros(const at::Tensor& q_BSHD, const at::Tensor& k_BTKD);
};

/// Adds the contribution of one attend()'s keys to `grads`. `grad` is the gradient of the whole result;
/// `all_keys` is the result over all keys, its `out` in q's dtype.
void attend_backward(const AttentionGradients& grads, const at::Tensor& grad_BSHD,
                     const QueriesKeysValues& in, const AttentionSum& all_keys, int64_t first_query);

}  // namespace titan::ops

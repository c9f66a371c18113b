#pragma once

// Attention by those of LibTorch's kernels that return and take the log-sum-exp, or by its matrix products if
// there is no such kernel.

#include <optional>
#include <tuple>

#include "titan/ops/functional.h"

namespace titan::ops {

/// [B, S, H, D] as [B, H, S, D], or back.
inline at::Tensor heads_first(const at::Tensor& x) { return x.transpose(1, 2); }
inline QueriesKeysValues heads_first(const QueriesKeysValues& in) {
  return {heads_first(in.q), heads_first(in.k), heads_first(in.v)};
}

/// Kernels expect the features of a head to be adjacent: LibTorch's for CPUs don't check it, those for GPUs
/// refuse others.
inline at::Tensor with_adjacent_features(const at::Tensor& x) {
  return x.stride(-1) == 1 ? x : x.contiguous();
}
inline QueriesKeysValues with_adjacent_features(const QueriesKeysValues& in) {
  return {with_adjacent_features(in.q), with_adjacent_features(in.k), with_adjacent_features(in.v)};
}

// The functions that follow take and return heads first: q [B, H, S, D]; k, v [B, K, T, D]; log_sum_exp
// [B, H, S], natural, in fp32 (float64 for float64).

struct KernelResult {
  at::Tensor out, log_sum_exp;
};

/// Attention over all keys, or if `causal`, of query i over the keys 0..i.
KernelResult run_attention_kernel(const QueriesKeysValues& in, bool causal);
/// `result` may include more keys than `in`.
QueriesKeysValues run_attention_kernel_backward(const at::Tensor& grad, const QueriesKeysValues& in,
                                                const KernelResult& result, bool causal);

/// The same by LibTorch's matrix products, a tile of keys at a time, for inputs that no fused kernel
/// supports: float64 on a GPU, unusual head sizes, and documents in fp32 on a GPU or in float64.
KernelResult tiled_attention(const QueriesKeysValues& in, bool causal, const Documents& documents = {});
QueriesKeysValues tiled_attention_backward(const at::Tensor& grad, const QueriesKeysValues& in,
                                           const KernelResult& result, bool causal,
                                           const Documents& documents = {});

// Sequence first, as everywhere else.

/// The operators titan::causal_attention, titan::attend_ and their backwards (operators.cpp), by these
/// kernels. `starts` and `longest` are a Documents.
std::tuple<at::Tensor, at::Tensor> causal_attention_by_libtorch(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& starts = std::nullopt, int64_t longest = 0);
std::tuple<at::Tensor, at::Tensor, at::Tensor> causal_attention_backward_by_libtorch(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& log_sum_exp,
    const std::optional<at::Tensor>& starts = std::nullopt, int64_t longest = 0);
void attend_by_libtorch(at::Tensor& out, at::Tensor& log_sum_exp, const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& v, int64_t first_query);
void attend_backward_by_libtorch(at::Tensor& grad_q, at::Tensor& grad_k, at::Tensor& grad_v,
                                 const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k,
                                 const at::Tensor& v, const at::Tensor& out, const at::Tensor& log_sum_exp,
                                 int64_t first_query);

}  // namespace titan::ops

#pragma once

// LibTorch's attention kernels that give and take the log-sum-exp, behind one signature. Heads first:
// q [B, H, S, D]; k, v [B, K, T, D]; log_sum_exp [B, H, S], natural, in fp32 (float64 of float64).

#include <memory>
#include <tuple>

#include <ATen/core/Tensor.h>

#include "ops/autograd_node.h"
#include "ops/saved_outputs.h"

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

/// Attention from LibTorch's products, a tile of keys at a time: for what no fused kernel takes (float64 on a
/// GPU, heads of odd sizes). Arguments as of run_attention_kernel and its backward.
KernelResult tiled_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal);
KernelGradients tiled_attention_backward(const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k,
                                         const at::Tensor& v, const at::Tensor& out,
                                         const at::Tensor& log_sum_exp, bool causal);

// Attention over parts of the keys by LibTorch's flash, cuDNN and memory-efficient kernels. Arguments as of
// titan::attend_ and titan::attend_backward_ (library.cpp).

void attend_by_libtorch(at::Tensor& out, at::Tensor& log_sum_exp, const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& v, int64_t first_query);

void attend_backward_by_libtorch(at::Tensor& grad_q, at::Tensor& grad_k, at::Tensor& grad_v,
                                 const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k,
                                 const at::Tensor& v, const at::Tensor& out, const at::Tensor& log_sum_exp,
                                 int64_t first_query);

/// into += part, as results of one softmax over the keys of both.
void merge_attention(at::Tensor& into_BSHD, at::Tensor& into_log_sum_exp_BHS, const at::Tensor& part_BSHD,
                     const at::Tensor& part_log_sum_exp_BHS);

// Attention as one node of the graph, whose results may be kept by a checkpoint ([Note: kept outputs] in
// ops/saved_outputs.h). q, k, v and out are [B, S, H, D] of any numbers of heads, log_sum_exp is the
// implementation's own.

/// What an implementation derives its node from.
struct AttentionBackward : BackwardNode {
  SavedVariable q, k, v, out, log_sum_exp;

  void save_inputs(const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in) {
    q = save_input(q_in);
    k = save_input(k_in);
    v = save_input(v_in);
  }
  void save_results(const at::Tensor& result, const at::Tensor& sums) {
    out = SavedVariable(result, /*is_output=*/true);
    log_sum_exp = save_input(sums);
  }
  void release_variables() override {
    for (SavedVariable* saved : {&q, &k, &v, &out, &log_sum_exp}) saved->reset_data();
  }
};

/// compute() returns (out, log_sum_exp), below autograd. NodeType: an AttentionBackward with the gradients of
/// q, k and v.
template <class NodeType, class Compute>
at::Tensor recorded_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const Compute& compute) {
  std::shared_ptr<NodeType> node;
  if (compute_requires_grad(q, k, v)) {
    node = make_node<NodeType>(q, k, v);
    node->save_inputs(q, k, v);
  }
  const auto [out, log_sum_exp] = kept(KeptKind::Attention, {}, [&] {
    BelowAutograd guard;
    return compute();
  });
  if (!node) return out;
  set_history(out, node);
  node->save_results(out, log_sum_exp);
  return out;
}

/// Causal attention by the kernel that LibTorch's scaled_dot_product_attention takes.
at::Tensor kernel_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

}  // namespace titan::ops

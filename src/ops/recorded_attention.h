#pragma once

// Attention as one node of the graph, whose results may be kept by a checkpoint ([Note: kept outputs] in
// titan/ops/saved_outputs.h). q, k, v and out are [B, S, H, D] of any numbers of heads, log_sum_exp is the
// implementation's own.

#include <memory>
#include <tuple>

#include "ops/autograd_node.h"
#include "titan/ops/saved_outputs.h"

namespace titan::ops {

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

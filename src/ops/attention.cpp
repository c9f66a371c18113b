#include <limits>

#include <ATen/ops/full.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>

#include "ops/attention_kernels.h"
#include "ops/autograd_node.h"
#include "ops/operators.h"

namespace titan::ops {

namespace {

// Attention as one node of the graph. q, k, v and out are [B, S, H, D]; log_sum_exp is the implementation's
// own.
struct AttentionBackward : BackwardNode {
  SavedVariable q, k, v, out, log_sum_exp;

  void save_inputs(const QueriesKeysValues& in) {
    q = save_input(in.q);
    k = save_input(in.k);
    v = save_input(in.v);
  }
  void save_results(const at::Tensor& result, const at::Tensor& sums) {
    out = SavedVariable(result, /*is_output=*/true);
    log_sum_exp = save_input(sums);
  }
  QueriesKeysValues unpack_inputs() const { return {q.unpack(), k.unpack(), v.unpack()}; }
  void release_variables() override {
    for (SavedVariable* saved : {&q, &k, &v, &out, &log_sum_exp}) saved->reset_data();
  }
};

// compute() returns (out, log_sum_exp), below autograd; a checkpoint may keep both ([Note: kept outputs]).
// NodeType: an AttentionBackward.
template <class NodeType, class Compute>
at::Tensor recorded_attention(const QueriesKeysValues& in, const Compute& compute) {
  std::shared_ptr<NodeType> node;
  if (compute_requires_grad(in.q, in.k, in.v)) {
    node = make_node<NodeType>(in.q, in.k, in.v);
    node->save_inputs(in);
  }
  const auto [out, log_sum_exp] = kept(KeptKind::Attention, {}, [&]() -> std::tuple<at::Tensor, at::Tensor> {
    BelowAutograd guard;
    return compute();
  });
  if (!node) return out;
  set_history(out, node);
  node->save_results(out, log_sum_exp);
  return out;
}

struct CausalAttentionBackward final : AttentionBackward {
  variable_list backward(const at::Tensor& grad) override {
    using Signature = std::tuple<at::Tensor, at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&,
                                                                     const at::Tensor&, const at::Tensor&,
                                                                     const at::Tensor&, const at::Tensor&);
    static const auto op = find_operator<Signature>("titan::causal_attention_backward");
    const QueriesKeysValues in = unpack_inputs();
    auto [grad_q, grad_k, grad_v] =
        op.call(grad, in.q, in.k, in.v, out.unpack(getptr()), log_sum_exp.unpack());
    return {std::move(grad_q), std::move(grad_k), std::move(grad_v)};
  }
  std::string name() const override { return "titan::causal_attention backward"; }
};

at::Tensor own_attention(const QueriesKeysValues& in) {
  using Signature =
      std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&);
  static const auto op = find_operator<Signature>("titan::causal_attention");
  return recorded_attention<CausalAttentionBackward>(in, [&] { return op.call(in.q, in.k, in.v); });
}

struct KernelAttentionBackward final : AttentionBackward {
  variable_list backward(const at::Tensor& grad) override {
    const QueriesKeysValues grads = heads_first(run_attention_kernel_backward(
        heads_first(grad), heads_first(unpack_inputs()),
        {heads_first(out.unpack(getptr())), log_sum_exp.unpack()}, /*causal=*/true));
    return {grads.q, grads.k, grads.v};
  }
  std::string name() const override { return "titan::causal_attention backward (LibTorch's kernel)"; }
};

at::Tensor libtorchs_attention(const QueriesKeysValues& in) {
  const bool grouped = in.q.size(2) != in.k.size(2);
  return heads_first(at::scaled_dot_product_attention(heads_first(in.q), heads_first(in.k), heads_first(in.v),
                                                      /*attn_mask=*/{}, /*dropout_p=*/0.0,
                                                      /*is_causal=*/true, /*scale=*/std::nullopt, grouped));
}

void check_shapes(const char* op, const QueriesKeysValues& in, const char* keys) {
  const auto& [q, k, v] = in;
  TITAN_CHECK(q.dim() == 4 && k.dim() == 4 && k.sizes() == v.sizes() && q.size(0) == k.size(0) &&
                  q.size(3) == k.size(3) && k.size(2) > 0 && q.size(2) % k.size(2) == 0,
              op, ": expected q [B, S, H, D] and k, v ", keys, " with H a multiple of K, got ", q.sizes(),
              ", ", k.sizes(), ", ", v.sizes());
}

void check_part(const char* op, const QueriesKeysValues& in, int64_t first_query) {
  check_shapes(op, in, "[B, T, K, D]");
  TITAN_CHECK(in.k.size(1) > 0, op, ": there are no keys");
  TITAN_CHECK(first_query >= 0, op, ": first_query is ", first_query,
              ", so that the first query sees no key; leave such queries out");
}

}  // namespace

at::Tensor kernel_attention(const QueriesKeysValues& in) {
  return recorded_attention<KernelAttentionBackward>(in, [&]() -> std::tuple<at::Tensor, at::Tensor> {
    const KernelResult result = run_attention_kernel(heads_first(in), /*causal=*/true);
    return {heads_first(result.out), result.log_sum_exp};
  });
}

at::Tensor causal_attention(const at::Tensor& q_BSHD, const at::Tensor& k_BSKD, const at::Tensor& v_BSKD) {
  const QueriesKeysValues in{q_BSHD, k_BSKD, v_BSKD};
  check_shapes("causal_attention", in, "[B, S, K, D]");
  TITAN_CHECK(q_BSHD.size(1) == k_BSKD.size(1), "causal_attention: ", q_BSHD.size(1), " queries and ",
              k_BSKD.size(1), " keys; expected as many");
  if (q_BSHD.is_cpu() || q_BSHD.is_meta()) return own_attention(in);
  const bool is_16bit = q_BSHD.scalar_type() == at::kBFloat16 || q_BSHD.scalar_type() == at::kHalf;
  if (SavedOutputs::current() && is_16bit) return kernel_attention(in);
  return libtorchs_attention(in);
}

AttentionSum AttentionSum::of_no_keys(const at::Tensor& q_BSHD) {
  const auto options = q_BSHD.options().dtype(composite::accumulate_type(q_BSHD));
  return {at::zeros(q_BSHD.sizes(), options), at::full({q_BSHD.size(0), q_BSHD.size(2), q_BSHD.size(1)},
                                                       -std::numeric_limits<double>::infinity(), options)};
}

AttentionSum AttentionSum::rows(int64_t first, int64_t count) const {
  return {out_BSHD.narrow(1, first, count), log_sum_exp_BHS.narrow(2, first, count)};
}

void attend(const AttentionSum& sum, const QueriesKeysValues& in, int64_t first_query) {
  check_part("attend", in, first_query);
  using Signature =
      void(at::Tensor&, at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t);
  static const auto op = find_operator<Signature>("titan::attend_");
  BelowAutograd guard;
  at::Tensor out = sum.out_BSHD, log_sum_exp = sum.log_sum_exp_BHS;
  op.call(out, log_sum_exp, in.q, in.k, in.v, first_query);
}

AttentionGradients AttentionGradients::zeros(const at::Tensor& q_BSHD, const at::Tensor& k_BTKD) {
  const auto dtype = composite::accumulate_type(q_BSHD);
  const auto zeros_like = [&](const at::Tensor& x) { return at::zeros(x.sizes(), x.options().dtype(dtype)); };
  return {zeros_like(q_BSHD), zeros_like(k_BTKD), zeros_like(k_BTKD)};
}

void attend_backward(const AttentionGradients& grads, const at::Tensor& grad_BSHD,
                     const QueriesKeysValues& in, const AttentionSum& all_keys, int64_t first_query) {
  check_part("attend_backward", in, first_query);
  using Signature = void(at::Tensor&, at::Tensor&, at::Tensor&, const at::Tensor&, const at::Tensor&,
                         const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t);
  static const auto op = find_operator<Signature>("titan::attend_backward_");
  BelowAutograd guard;
  at::Tensor grad_q = grads.q_BSHD, grad_k = grads.k_BTKD, grad_v = grads.v_BTKD;
  op.call(grad_q, grad_k, grad_v, grad_BSHD, in.q, in.k, in.v, all_keys.out_BSHD, all_keys.log_sum_exp_BHS,
          first_query);
}

}  // namespace titan::ops

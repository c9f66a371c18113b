#include <limits>

#include <ATen/ops/full.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>

#include "ops/attention_kernels.h"
#include "ops/operators.h"
#include "titan/ops/functional.h"

namespace titan::ops {

namespace {

at::Tensor heads_first(const at::Tensor& x) { return x.transpose(1, 2); }

struct KernelAttentionBackward final : AttentionBackward {
  variable_list backward(const at::Tensor& grad) override {
    const auto grads = run_attention_kernel_backward(
        heads_first(grad), heads_first(q.unpack()), heads_first(k.unpack()), heads_first(v.unpack()),
        heads_first(out.unpack(getptr())), log_sum_exp.unpack(), /*causal=*/true);
    return {heads_first(grads.q), heads_first(grads.k), heads_first(grads.v)};
  }
  std::string name() const override { return "titan::causal_attention backward (LibTorch's kernel)"; }
};

}  // namespace

at::Tensor kernel_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  using Results = std::tuple<at::Tensor, at::Tensor>;
  return recorded_attention<KernelAttentionBackward>(q, k, v, [&]() -> Results {
    const auto result = run_attention_kernel(heads_first(q), heads_first(k), heads_first(v), /*causal=*/true);
    return {heads_first(result.out), result.log_sum_exp};
  });
}

namespace {

struct CausalAttentionBackward final : AttentionBackward {
  variable_list backward(const at::Tensor& grad) override {
    using Signature = std::tuple<at::Tensor, at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&,
                                                                     const at::Tensor&, const at::Tensor&,
                                                                     const at::Tensor&, const at::Tensor&);
    static const auto op = find_operator<Signature>("titan::causal_attention_backward");
    auto [grad_q, grad_k, grad_v] =
        op.call(grad, q.unpack(), k.unpack(), v.unpack(), out.unpack(getptr()), log_sum_exp.unpack());
    return {std::move(grad_q), std::move(grad_k), std::move(grad_v)};
  }
  std::string name() const override { return "titan::causal_attention backward"; }
};

void check_parts(const char* op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                 int64_t first_query) {
  TITAN_CHECK(q.dim() == 4 && k.dim() == 4 && k.sizes() == v.sizes() && q.size(0) == k.size(0) &&
                  q.size(3) == k.size(3) && k.size(2) > 0 && q.size(2) % k.size(2) == 0 && k.size(1) > 0,
              op, ": expected q [B, S, H, D] and k, v [B, T, K, D] with H a multiple of K, got ", q.sizes(),
              ", ", k.sizes(), ", ", v.sizes());
  TITAN_CHECK(first_query >= 0, op, ": first_query is ", first_query,
              ", so that the first query sees no key; leave such queries out");
}

at::Tensor own_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  using Results = std::tuple<at::Tensor, at::Tensor>;
  using Signature = Results(const at::Tensor&, const at::Tensor&, const at::Tensor&);
  static const auto op = find_operator<Signature>("titan::causal_attention");
  return recorded_attention<CausalAttentionBackward>(q, k, v, [&]() -> Results { return op.call(q, k, v); });
}

bool is_16bit(const at::Tensor& x) {
  return x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf;
}

at::Tensor libtorchs_attention(const at::Tensor& q_BSHD, const at::Tensor& k_BSKD, const at::Tensor& v_BSKD) {
  const bool grouped = q_BSHD.size(2) != k_BSKD.size(2);
  return at::scaled_dot_product_attention(
             q_BSHD.transpose(1, 2), k_BSKD.transpose(1, 2), v_BSKD.transpose(1, 2), /*attn_mask=*/{},
             /*dropout_p=*/0.0, /*is_causal=*/true, /*scale=*/std::nullopt, grouped)
      .transpose(1, 2);
}

}  // namespace

at::Tensor causal_attention(const at::Tensor& q_BSHD, const at::Tensor& k_BSKD, const at::Tensor& v_BSKD) {
  TITAN_CHECK(q_BSHD.dim() == 4 && k_BSKD.dim() == 4 && k_BSKD.sizes() == v_BSKD.sizes() &&
                  q_BSHD.size(0) == k_BSKD.size(0) && q_BSHD.size(1) == k_BSKD.size(1) &&
                  q_BSHD.size(3) == k_BSKD.size(3) && k_BSKD.size(2) > 0 &&
                  q_BSHD.size(2) % k_BSKD.size(2) == 0,
              "causal_attention: expected q [B, S, H, D] and k, v [B, S, K, D] with H a multiple of K, got ",
              q_BSHD.sizes(), ", ", k_BSKD.sizes(), ", ", v_BSKD.sizes());
  if (q_BSHD.is_cpu() || q_BSHD.is_meta()) return own_attention(q_BSHD, k_BSKD, v_BSKD);
  if (SavedOutputs::current() && is_16bit(q_BSHD)) return kernel_attention(q_BSHD, k_BSKD, v_BSKD);
  return libtorchs_attention(q_BSHD, k_BSKD, v_BSKD);
}

AttentionSum AttentionSum::of_no_keys(const at::Tensor& q_BSHD) {
  const auto options = q_BSHD.options().dtype(composite::accumulate_type(q_BSHD));
  return {at::zeros(q_BSHD.sizes(), options), at::full({q_BSHD.size(0), q_BSHD.size(2), q_BSHD.size(1)},
                                                       -std::numeric_limits<double>::infinity(), options)};
}

AttentionSum AttentionSum::rows(int64_t first, int64_t count) const {
  return {out_BSHD.narrow(1, first, count), log_sum_exp_BHS.narrow(2, first, count)};
}

void attend(const AttentionSum& sum, const at::Tensor& q_BSHD, const at::Tensor& k_BTKD,
            const at::Tensor& v_BTKD, int64_t first_query) {
  check_parts("attend", q_BSHD, k_BTKD, v_BTKD, first_query);
  using Signature =
      void(at::Tensor&, at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t);
  static const auto op = find_operator<Signature>("titan::attend_");
  BelowAutograd guard;
  at::Tensor out = sum.out_BSHD, log_sum_exp = sum.log_sum_exp_BHS;
  op.call(out, log_sum_exp, q_BSHD, k_BTKD, v_BTKD, first_query);
}

AttentionGradients AttentionGradients::zeros(const at::Tensor& q_BSHD, const at::Tensor& k_BTKD) {
  const auto dtype = composite::accumulate_type(q_BSHD);
  const auto zeros_like = [&](const at::Tensor& x) { return at::zeros(x.sizes(), x.options().dtype(dtype)); };
  return {zeros_like(q_BSHD), zeros_like(k_BTKD), zeros_like(k_BTKD)};
}

void attend_backward(const AttentionGradients& grads, const at::Tensor& grad_BSHD, const at::Tensor& q_BSHD,
                     const at::Tensor& k_BTKD, const at::Tensor& v_BTKD, const at::Tensor& out_BSHD,
                     const at::Tensor& log_sum_exp_BHS, int64_t first_query) {
  check_parts("attend_backward", q_BSHD, k_BTKD, v_BTKD, first_query);
  using Signature = void(at::Tensor&, at::Tensor&, at::Tensor&, const at::Tensor&, const at::Tensor&,
                         const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t);
  static const auto op = find_operator<Signature>("titan::attend_backward_");
  BelowAutograd guard;
  at::Tensor grad_q = grads.q_BSHD, grad_k = grads.k_BTKD, grad_v = grads.v_BTKD;
  op.call(grad_q, grad_k, grad_v, grad_BSHD, q_BSHD, k_BTKD, v_BTKD, out_BSHD, log_sum_exp_BHS, first_query);
}

}  // namespace titan::ops

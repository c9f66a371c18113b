#include "titan/ops/attention.h"

#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include "ops/autograd_node.h"
#include "ops/cpu_features.h"

namespace titan::ops {

namespace {

at::ScalarType compute_type(const at::Tensor& tensor) {
  const bool is_16bit = tensor.element_size() == 2;
  return is_16bit && !cpu_features().fast_16bit_products ? at::kFloat : tensor.scalar_type();
}

// LibTorch's kernels want the heads before the sequence, in any strides.
at::Tensor heads_first(const at::Tensor& x_BSHD) { return x_BSHD.transpose(1, 2); }

struct FlashAttentionBackward final : BackwardNode {
  SavedVariable q, k, v, out;
  at::Tensor log_sum_exp;

  variable_list backward(const at::Tensor& grad) override {
    const at::Tensor q_BSHD = q.unpack(), out_BSHD = out.unpack(getptr());
    const at::ScalarType dtype = compute_type(q_BSHD);
    const auto operand = [dtype](const at::Tensor& x_BSHD) { return heads_first(x_BSHD.to(dtype)); };
    auto [grad_q, grad_k, grad_v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        operand(grad), operand(q_BSHD), operand(k.unpack()), operand(v.unpack()), operand(out_BSHD),
        log_sum_exp, /*dropout_p=*/0.0,
        /*is_causal=*/true);
    const auto result = [&q_BSHD](const at::Tensor& grad_BHSD) {
      return heads_first(grad_BHSD).to(q_BSHD.scalar_type());
    };
    return {result(grad_q), result(grad_k), result(grad_v)};
  }
  void release_variables() override {
    for (SavedVariable* saved : {&q, &k, &v, &out}) saved->reset_data();
    log_sum_exp.reset();
  }
  std::string name() const override { return "titan::causal_attention backward"; }
};

at::Tensor flash_attention_on_cpu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  at::Tensor out, log_sum_exp;
  {
    BelowAutograd guard;
    const at::ScalarType dtype = compute_type(q);
    std::tie(out, log_sum_exp) = at::_scaled_dot_product_flash_attention_for_cpu(
        heads_first(q.to(dtype)), heads_first(k.to(dtype)), heads_first(v.to(dtype)), /*dropout_p=*/0.0,
        /*is_causal=*/true);
    out = heads_first(out).to(q.scalar_type());
  }
  if (!compute_requires_grad(q, k, v)) return out;
  const auto node = record<FlashAttentionBackward>(out, q, k, v);
  node->q = save_input(q);
  node->k = save_input(k);
  node->v = save_input(v);
  node->out = SavedVariable(out, /*is_output=*/true);
  node->log_sum_exp = std::move(log_sum_exp);
  return out;
}

}  // namespace

at::Tensor causal_attention(const at::Tensor& q_BSHD, const at::Tensor& k_BSKD, const at::Tensor& v_BSKD) {
  TITAN_CHECK(q_BSHD.dim() == 4 && k_BSKD.dim() == 4 && k_BSKD.sizes() == v_BSKD.sizes() &&
                  q_BSHD.size(2) % k_BSKD.size(2) == 0 && q_BSHD.size(1) == k_BSKD.size(1),
              "causal_attention: expected q [B, S, H, D] and k, v [B, S, K, D] with H a multiple of K, got ",
              q_BSHD.sizes(), ", ", k_BSKD.sizes(), ", ", v_BSKD.sizes());
  if (q_BSHD.is_cpu() || q_BSHD.is_meta()) return flash_attention_on_cpu(q_BSHD, k_BSKD, v_BSKD);
  const bool grouped = q_BSHD.size(2) != k_BSKD.size(2);
  return heads_first(at::scaled_dot_product_attention(
      heads_first(q_BSHD), heads_first(k_BSKD), heads_first(v_BSKD), /*attn_mask=*/{},
      /*dropout_p=*/0.0, /*is_causal=*/true, /*scale=*/std::nullopt, grouped));
}

}  // namespace titan::ops

#include "ops/attention_kernels.h"

#include <ATen/SDPBackend.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "ops/tiled_attention.h"

namespace titan::ops {

namespace {

using at::SDPBackend;
using at::Tensor;

// What scaled_dot_product_attention would take; instead of its last choice, the whole matrix of scores, tiles
// of it (SDPBackend::math here).
SDPBackend choose(const Tensor& q, const Tensor& k, const Tensor& v, bool causal) {
  const bool grouped = q.size(1) != k.size(1);
  const auto choice = static_cast<SDPBackend>(
      at::_fused_sdp_choice(q, k, v, /*attn_mask=*/{}, /*dropout_p=*/0.0, causal, /*scale=*/{}, grouped));
  // It pads heads for flash, which takes multiples of 8 features only.
  if (choice == SDPBackend::flash_attention && q.size(3) % 8 != 0) return SDPBackend::math;
  if (choice == SDPBackend::flash_attention || choice == SDPBackend::cudnn_attention) return choice;
  // The efficient kernel isn't chosen for groups, which it doesn't know; here they come to it one by one.
  const bool takes_groups = grouped && q.scalar_type() == at::kFloat && q.size(3) % 4 == 0;
  return choice == SDPBackend::efficient_attention || takes_groups ? SDPBackend::efficient_attention
                                                                   : SDPBackend::math;
}

// Of dropout, which there is none of.
Tensor no_seed(const Tensor& like) { return at::zeros({}, like.options().dtype(at::kLong)); }
// The same where a kernel wants it as one state.
Tensor no_state(const Tensor& like) { return at::zeros({2}, like.options().dtype(at::kUInt64)); }

// ---- the CPU's

// It takes a head's features for adjacent, and doesn't look.
Tensor with_adjacent_features(const Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

KernelResult flash_on_cpu(const Tensor& q, const Tensor& k, const Tensor& v, bool causal) {
  auto [out, log_sum_exp] =
      at::_scaled_dot_product_flash_attention_for_cpu(with_adjacent_features(q), with_adjacent_features(k),
                                                      with_adjacent_features(v), /*dropout_p=*/0.0, causal);
  return {out, log_sum_exp};
}

KernelGradients flash_on_cpu_backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                                      const Tensor& out, const Tensor& log_sum_exp, bool causal) {
  auto [grad_q, grad_k, grad_v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      with_adjacent_features(grad), with_adjacent_features(q), with_adjacent_features(k),
      with_adjacent_features(v), with_adjacent_features(out), log_sum_exp, /*dropout_p=*/0.0, causal);
  return {grad_q, grad_k, grad_v};
}

// ---- flash

KernelResult flash(const Tensor& q, const Tensor& k, const Tensor& v, bool causal) {
  auto result = at::_scaled_dot_product_flash_attention(q, k, v, /*dropout_p=*/0.0, causal);
  return {std::get<0>(result), std::get<1>(result)};
}

KernelGradients flash_backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                               const Tensor& out, const Tensor& log_sum_exp, bool causal) {
  auto [grad_q, grad_k, grad_v] = at::_scaled_dot_product_flash_attention_backward(
      grad, q, k, v, out, log_sum_exp.contiguous(), /*cum_seq_q=*/{}, /*cum_seq_k=*/{}, q.size(2), k.size(2),
      /*dropout_p=*/0.0, causal, no_state(q), no_seed(q));
  return {grad_q, grad_k, grad_v};
}

// ---- cuDNN

KernelResult cudnn(const Tensor& q, const Tensor& k, const Tensor& v, bool causal) {
  auto result =
      at::_scaled_dot_product_cudnn_attention(q, k, v, /*attn_bias=*/{},
                                              /*compute_log_sumexp=*/true, /*dropout_p=*/0.0, causal);
  const Tensor& log_sum_exp = std::get<1>(result);
  return {std::get<0>(result), log_sum_exp.dim() == 4 ? log_sum_exp.squeeze(-1) : log_sum_exp};
}

KernelGradients cudnn_backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                               const Tensor& out, const Tensor& log_sum_exp, bool causal) {
  auto [grad_q, grad_k, grad_v] = at::_scaled_dot_product_cudnn_attention_backward(
      grad, q, k, v, out, log_sum_exp.contiguous().unsqueeze(-1), no_seed(q), no_seed(q), /*attn_bias=*/{},
      /*cum_seq_q=*/{}, /*cum_seq_k=*/{}, q.size(2), k.size(2), /*dropout_p=*/0.0, causal);
  return {grad_q, grad_k, grad_v};
}

// ---- memory-efficient

// Its log-sum-exp has rows of a multiple of this.
constexpr int64_t kEfficientAlignment = 32;

// Query heads g, G + g, ... read the key heads 0, 1, ...: with G of them a call for each g, and no copies of
// keys.
Tensor heads_of_group(const Tensor& x, int64_t g, int64_t group) {
  return group == 1 ? x : x.unflatten(1, {-1, group}).select(2, g);
}

KernelResult efficient(const Tensor& q, const Tensor& k, const Tensor& v, bool causal) {
  const int64_t group = q.size(1) / k.size(1);
  KernelResult result{at::empty_like(q),
                      at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat))};
  for (int64_t g = 0; g < group; ++g) {
    auto part = at::_scaled_dot_product_efficient_attention(heads_of_group(q, g, group), k, v,
                                                            /*attn_bias=*/{}, /*compute_log_sumexp=*/true,
                                                            /*dropout_p=*/0.0, causal);
    heads_of_group(result.out, g, group).copy_(std::get<0>(part));
    heads_of_group(result.log_sum_exp, g, group).copy_(std::get<1>(part).narrow(2, 0, q.size(2)));
  }
  return result;
}

KernelGradients efficient_backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                                   const Tensor& out, const Tensor& log_sum_exp, bool causal) {
  const int64_t group = q.size(1) / k.size(1), rest = -q.size(2) % kEfficientAlignment;
  const Tensor padded =
      rest == 0 ? log_sum_exp : at::constant_pad_nd(log_sum_exp, {0, rest + kEfficientAlignment});
  KernelGradients grads{at::empty_like(q), at::zeros_like(k), at::zeros_like(v)};
  for (int64_t g = 0; g < group; ++g) {
    const auto mine = [&](const Tensor& x) { return heads_of_group(x, g, group); };
    auto part = at::_scaled_dot_product_efficient_attention_backward(
        mine(grad), mine(q), k, v, /*attn_bias=*/{}, mine(out), mine(padded).contiguous(), no_seed(q),
        no_seed(q), /*dropout_p=*/0.0, /*grad_input_mask=*/{true, true, true, false}, causal);
    mine(grads.q).copy_(std::get<0>(part));
    grads.k.add_(std::get<1>(part));
    grads.v.add_(std::get<2>(part));
  }
  return grads;
}

}  // namespace

KernelResult run_attention_kernel(const Tensor& q, const Tensor& k, const Tensor& v, bool causal) {
  if (q.is_cpu()) return flash_on_cpu(q, k, v, causal);
  switch (choose(q, k, v, causal)) {
    case SDPBackend::flash_attention:
      return flash(q, k, v, causal);
    case SDPBackend::cudnn_attention:
      return cudnn(q, k, v, causal);
    case SDPBackend::efficient_attention:
      return efficient(q, k, v, causal);
    default:
      return tiled_attention(q, k, v, causal);
  }
}

KernelGradients run_attention_kernel_backward(const Tensor& grad, const Tensor& q, const Tensor& k,
                                              const Tensor& v, const Tensor& out, const Tensor& log_sum_exp,
                                              bool causal) {
  if (q.is_cpu()) return flash_on_cpu_backward(grad, q, k, v, out, log_sum_exp, causal);
  switch (choose(q, k, v, causal)) {
    case SDPBackend::flash_attention:
      return flash_backward(grad, q, k, v, out, log_sum_exp, causal);
    case SDPBackend::cudnn_attention:
      return cudnn_backward(grad, q, k, v, out, log_sum_exp, causal);
    case SDPBackend::efficient_attention:
      return efficient_backward(grad, q, k, v, out, log_sum_exp, causal);
    default:
      return tiled_attention_backward(grad, q, k, v, out, log_sum_exp, causal);
  }
}

}  // namespace titan::ops

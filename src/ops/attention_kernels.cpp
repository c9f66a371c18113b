#include "ops/attention_kernels.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/SDPBackend.h>
#include <ATen/TensorOperators.h>
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
#include <ATen/ops/full.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "ops/operators.h"
#include "titan/core/error.h"

namespace titan::ops {

namespace {

at::Tensor by_heads(const at::Tensor& x_BSHD) { return x_BSHD.transpose(1, 2); }

// The kernels know two masks. Queries that see `first_query` more keys than on a diagonal are a part without
// a mask, and a causal one.
struct Part {
  int64_t first_key, num_keys;
  bool causal;
};

c10::SmallVector<Part, 2> parts_of(int64_t num_queries, int64_t num_keys, int64_t first_query) {
  if (first_query >= num_keys - 1) return {{0, num_keys, false}};
  c10::SmallVector<Part, 2> parts;
  if (first_query > 0) parts.push_back({0, first_query, false});
  // What no query sees is left out: the kernels differ in where they put a diagonal that isn't square.
  const int64_t on_diagonal = std::min(num_queries, num_keys - first_query);
  TITAN_CHECK(on_diagonal == num_queries, "attention in parts: ", num_queries, " queries from position ",
              first_query, " on see a diagonal of ", on_diagonal,
              " keys only; LibTorch's kernels need one that is square, or no mask");
  parts.push_back({first_query, on_diagonal, true});
  return parts;
}

}  // namespace

void merge_attention(at::Tensor& into_BSHD, at::Tensor& into_log_sum_exp_BHS, const at::Tensor& part_BSHD,
                     const at::Tensor& part_log_sum_exp_BHS) {
  const at::Tensor part = part_log_sum_exp_BHS.to(into_log_sum_exp_BHS.scalar_type());
  // Of the sum, what the part contributes; all of it where there was nothing (-inf).
  const at::Tensor weight = at::sigmoid(part - into_log_sum_exp_BHS).transpose(1, 2).unsqueeze(-1);
  into_BSHD.lerp_(part_BSHD.to(into_BSHD.scalar_type()), weight);
  at::logaddexp_out(into_log_sum_exp_BHS, into_log_sum_exp_BHS, part);
}

void attend_by_libtorch(at::Tensor& out, at::Tensor& log_sum_exp, const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& v, int64_t first_query) {
  for (const Part& part : parts_of(q.size(1), k.size(1), first_query)) {
    const auto keys = [&](const at::Tensor& x) {
      return by_heads(x.narrow(1, part.first_key, part.num_keys));
    };
    const KernelResult result = run_attention_kernel(by_heads(q), keys(k), keys(v), part.causal);
    merge_attention(out, log_sum_exp, by_heads(result.out), result.log_sum_exp);
  }
}

void attend_backward_by_libtorch(at::Tensor& grad_q, at::Tensor& grad_k, at::Tensor& grad_v,
                                 const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k,
                                 const at::Tensor& v, const at::Tensor& out, const at::Tensor& log_sum_exp,
                                 int64_t first_query) {
  for (const Part& part : parts_of(q.size(1), k.size(1), first_query)) {
    const auto keys = [&](const at::Tensor& x) { return x.narrow(1, part.first_key, part.num_keys); };
    const KernelGradients grads =
        run_attention_kernel_backward(by_heads(grad), by_heads(q), by_heads(keys(k)), by_heads(keys(v)),
                                      by_heads(out), log_sum_exp, part.causal);
    grad_q.add_(by_heads(grads.q));
    keys(grad_k).add_(by_heads(grads.k));
    keys(grad_v).add_(by_heads(grads.v));
  }
}

// B batch, K key heads, G query heads that share one, S queries, T keys of a tile, D features.

namespace {

using at::Tensor;

constexpr int64_t kTile = 256;

// What all tiles share. Queries carry the scale.
struct Queries {
  int64_t group;
  Tensor q_BKGSD;
  at::ScalarType wide;

  Queries(const Tensor& q, const Tensor& k)
      : group(q.size(1) / k.size(1)),
        q_BKGSD(grouped(q) / std::sqrt(static_cast<double>(q.size(3)))),
        wide(composite::accumulate_type(q)) {}
  /// x [B, H, S, ...] in at least fp32.
  Tensor grouped(const Tensor& x) const {
    return x.to(composite::accumulate_type(x)).unflatten(1, {-1, group});
  }
};

// Keys first .. first + count, and the queries that see any of them.
struct Tile {
  int64_t first, count, first_query;
  bool causal;

  Tensor keys(const Tensor& x, at::ScalarType dtype) const {
    return x.narrow(2, first, count).to(dtype).unsqueeze(2);  // [B, K, 1, T, D]
  }
  /// Of x [B, K, G, S, ...].
  Tensor queries(const Tensor& x) const { return x.narrow(3, first_query, x.size(3) - first_query); }

  Tensor scores(const Queries& of, const Tensor& keys_BK1TD) const {
    Tensor scores = at::matmul(queries(of.q_BKGSD), keys_BK1TD.transpose(-1, -2));
    if (!causal) return scores;
    const Tensor hidden = at::ones({scores.size(-2), count}, scores.options().dtype(at::kBool)).triu_(1);
    return scores.masked_fill_(hidden, -std::numeric_limits<double>::infinity());
  }
};

template <class Visit>
void for_each_tile(const Tensor& q, const Tensor& k, bool causal, Visit visit) {
  const int64_t keys = causal ? std::min(k.size(2), q.size(2)) : k.size(2);
  for (int64_t first = 0; first < keys; first += kTile)
    visit(Tile{first, std::min(kTile, keys - first), causal ? first : 0, causal});
}

}  // namespace

KernelResult tiled_attention(const Tensor& q, const Tensor& k, const Tensor& v, bool causal) {
  const Queries of(q, k);
  Tensor out = at::zeros(q.sizes(), q.options().dtype(of.wide));
  Tensor log_sum_exp =
      at::full({q.size(0), q.size(1), q.size(2)}, -std::numeric_limits<double>::infinity(), out.options());
  for_each_tile(q, k, causal, [&](const Tile& tile) {
    const Tensor scores = tile.scores(of, tile.keys(k, of.wide));
    const Tensor sums = at::logsumexp(scores, {-1}, /*keepdim=*/true);
    const Tensor part = at::matmul((scores - sums).exp_(), tile.keys(v, of.wide));
    const int64_t rows = q.size(2) - tile.first_query;
    Tensor into = out.narrow(2, tile.first_query, rows).transpose(1, 2),
           into_sums = log_sum_exp.narrow(2, tile.first_query, rows);
    merge_attention(into, into_sums, part.flatten(1, 2).transpose(1, 2), sums.squeeze(-1).flatten(1, 2));
  });
  return {out.to(q.scalar_type()), log_sum_exp};
}

KernelGradients tiled_attention_backward(const Tensor& grad, const Tensor& q, const Tensor& k,
                                         const Tensor& v, const Tensor& out, const Tensor& log_sum_exp,
                                         bool causal) {
  const Queries of(q, k);
  const double scale = 1 / std::sqrt(static_cast<double>(q.size(3)));
  const auto zeros_like = [&](const Tensor& x) { return at::zeros(x.sizes(), x.options().dtype(of.wide)); };
  KernelGradients grads{zeros_like(q), zeros_like(k), zeros_like(v)};
  const Tensor grad_BKGSD = of.grouped(grad), sums_BKGS1 = of.grouped(log_sum_exp).unsqueeze(-1);
  const Tensor delta_BKGS1 = (grad_BKGSD * of.grouped(out)).sum(-1, /*keepdim=*/true);
  for_each_tile(q, k, causal, [&](const Tile& tile) {
    const Tensor keys = tile.keys(k, of.wide), values = tile.keys(v, of.wide),
                 grad_out = tile.queries(grad_BKGSD);
    const Tensor p = (tile.scores(of, keys) - tile.queries(sums_BKGS1)).exp_();
    const Tensor ds = p * (at::matmul(grad_out, values.transpose(-1, -2)) - tile.queries(delta_BKGS1));
    tile.queries(of.grouped(grads.q)).add_(at::matmul(ds, keys), scale);
    const auto of_keys = [&](const Tensor& x) { return x.narrow(2, tile.first, tile.count); };
    of_keys(grads.k).add_(at::matmul(ds.transpose(-1, -2), tile.queries(of.q_BKGSD)).sum(2));
    of_keys(grads.v).add_(at::matmul(p.transpose(-1, -2), grad_out).sum(2));
  });
  return grads;
}

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

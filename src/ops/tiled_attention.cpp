// B batch, K key heads, G query heads that share one, S queries, T keys of a tile, D features.

#include "ops/tiled_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "ops/attention_parts.h"
#include "ops/composite.h"

namespace titan::ops {

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

}  // namespace titan::ops

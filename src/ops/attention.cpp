#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <ATen/SDPBackend.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/clamp_min.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/SmallVector.h>

#include "ops/attention.h"
#include "ops/autograd_node.h"
#include "ops/operators.h"
#include "titan/core/log.h"

namespace titan::ops {

namespace {

using at::SDPBackend;
using at::Tensor;

using Qkv = QueriesKeysValues;

constexpr double kNoDropout = 0.0;

// Tells of each kernel once, because a job's speed depends on it.
void tell(SDPBackend choice, const Tensor& q, bool documents = false) {
  static std::array<std::array<std::atomic<bool>, at::num_sdp_backends>, 2> told{};
  if (told[documents][static_cast<size_t>(choice)].exchange(true)) return;
  const std::string heads = str("attention of ", c10::toString(q.scalar_type()), " heads of ", q.size(3),
                                " features", documents ? ", within documents," : "");
  if (choice == SDPBackend::cudnn_attention) return log::info_rank0(heads + " uses cuDNN's kernel");
  if (choice == SDPBackend::flash_attention)
    return log::info_rank0(heads + " uses LibTorch's FlashAttention");
  if (choice == SDPBackend::efficient_attention)
    return log::info_rank0(heads + " uses LibTorch's memory-efficient kernel");
  log::warning_rank0(
      heads +
      " uses matrix products, a tile of keys at a time, which is slow: LibTorch has no fused kernel for it");
}

// Chooses as scaled_dot_product_attention does, except that SDPBackend::math means tiles of the matrix of
// scores here, not the whole matrix.
SDPBackend choose(const Qkv& in, bool causal) {
  const bool grouped = in.q.size(1) != in.k.size(1);
  const auto choice = static_cast<SDPBackend>(
      at::_fused_sdp_choice(in.q, in.k, in.v, /*attn_mask=*/{}, kNoDropout, causal, /*scale=*/{}, grouped));
  // LibTorch pads heads for flash, which supports only multiples of 8 features.
  if (choice == SDPBackend::flash_attention && in.q.size(3) % 8 != 0) return SDPBackend::math;
  // With so many keys cuDNN's backward on Hopper reads 64 more, which no causal mask hides: gradients of queries whose log-sum-exp is far below 0 are
  // NaN (pull request 628 of NVIDIA/cudnn-frontend; mended in versions after LibTorch 2.11's). FlashAttention takes whatever cuDNN takes.
  const bool reads_beyond = !causal && in.k.size(2) % 128 == 64;
  if (choice == SDPBackend::cudnn_attention) return reads_beyond ? SDPBackend::flash_attention : choice;
  if (choice == SDPBackend::flash_attention) return choice;
  // LibTorch doesn't choose the efficient kernel for grouped heads, because the kernel doesn't support them.
  // Here each head of a group is a separate call.
  const bool takes_groups = grouped && in.q.scalar_type() == at::kFloat && in.q.size(3) % 4 == 0;
  return choice == SDPBackend::efficient_attention || takes_groups ? SDPBackend::efficient_attention
                                                                   : SDPBackend::math;
}

// The unused dropout state, whose numbers no kernel reads.
Tensor no_seed(const Tensor& like) { return at::empty({}, like.options().dtype(at::kLong)); }
// One-tensor form of the unused dropout state.
Tensor no_state(const Tensor& like) { return at::empty({2}, like.options().dtype(at::kUInt64)); }

// ---- LibTorch's flash kernel on a CPU

KernelResult flash_on_cpu(const Qkv& any, bool causal) {
  const Qkv in = with_adjacent_features(any);
  auto [out, log_sum_exp] =
      at::_scaled_dot_product_flash_attention_for_cpu(in.q, in.k, in.v, kNoDropout, causal);
  return {out, log_sum_exp};
}

Qkv flash_on_cpu_backward(const Tensor& grad, const Qkv& any, const KernelResult& result, bool causal) {
  const Qkv in = with_adjacent_features(any);
  auto [grad_q, grad_k, grad_v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      with_adjacent_features(grad), in.q, in.k, in.v, with_adjacent_features(result.out), result.log_sum_exp,
      kNoDropout, causal);
  return {grad_q, grad_k, grad_v};
}

// ---- flash

KernelResult flash(const Qkv& in, bool causal) {
  auto result = at::_scaled_dot_product_flash_attention(in.q, in.k, in.v, kNoDropout, causal);
  return {std::get<0>(result), std::get<1>(result)};
}

Qkv flash_backward(const Tensor& grad, const Qkv& in, const KernelResult& result, bool causal) {
  auto [grad_q, grad_k, grad_v] = at::_scaled_dot_product_flash_attention_backward(
      grad, in.q, in.k, in.v, result.out, result.log_sum_exp.contiguous(), /*cum_seq_q=*/{}, /*cum_seq_k=*/{},
      in.q.size(2), in.k.size(2), kNoDropout, causal, no_state(in.q), no_seed(in.q));
  return {grad_q, grad_k, grad_v};
}

// ---- flash, on the documents of all rows in one call

// The kernel's form of x [B, S, H, D]: all tokens, one document after the other.
Tensor packed(const Tensor& x) { return with_adjacent_features(x).flatten(0, 1); }

// The log-sum-exp is [H, B * S].
KernelResult flash_in_documents(const Qkv& in, const Documents& documents) {
  auto result = at::_flash_attention_forward(packed(in.q), packed(in.k), packed(in.v), documents.starts,
                                             documents.starts, documents.longest, documents.longest,
                                             kNoDropout, /*is_causal=*/true, /*return_debug_mask=*/false);
  return {std::get<0>(result).view(in.q.sizes()), std::get<1>(result)};
}

Qkv flash_in_documents_backward(const Tensor& grad, const Qkv& in, const KernelResult& result,
                                const Documents& documents) {
  auto [grad_q, grad_k, grad_v] = at::_flash_attention_backward(
      packed(grad), packed(in.q), packed(in.k), packed(in.v), packed(result.out), result.log_sum_exp,
      documents.starts, documents.starts, documents.longest, documents.longest, kNoDropout,
      /*is_causal=*/true, no_state(in.q), no_seed(in.q));
  return {grad_q.view(in.q.sizes()), grad_k.view(in.k.sizes()), grad_v.view(in.v.sizes())};
}

// ---- cuDNN

KernelResult cudnn(const Qkv& in, bool causal) {
  auto result = at::_scaled_dot_product_cudnn_attention(in.q, in.k, in.v, /*attn_bias=*/{},
                                                        /*compute_log_sumexp=*/true, kNoDropout, causal);
  const Tensor& log_sum_exp = std::get<1>(result);
  return {std::get<0>(result), log_sum_exp.dim() == 4 ? log_sum_exp.squeeze(-1) : log_sum_exp};
}

Qkv cudnn_backward(const Tensor& grad, const Qkv& in, const KernelResult& result, bool causal) {
  auto [grad_q, grad_k, grad_v] = at::_scaled_dot_product_cudnn_attention_backward(
      grad, in.q, in.k, in.v, result.out, result.log_sum_exp.contiguous().unsqueeze(-1), no_seed(in.q),
      no_seed(in.q), /*attn_bias=*/{}, /*cum_seq_q=*/{}, /*cum_seq_k=*/{}, in.q.size(2), in.k.size(2),
      kNoDropout, causal);
  return {grad_q, grad_k, grad_v};
}

// ---- memory-efficient

// The kernel's log-sum-exp has a multiple of this many rows.
constexpr int64_t kEfficientAlignment = 32;

// With groups of G, query heads g, G + g, ... read the key heads 0, 1, ..., so there is one call for each g
// and no copy of the keys.
Tensor heads_of_group(const Tensor& x, int64_t g, int64_t group) {
  return group == 1 ? x : x.unflatten(1, {-1, group}).select(2, g);
}

KernelResult efficient(const Qkv& in, bool causal) {
  const Tensor& q = in.q;
  const int64_t group = q.size(1) / in.k.size(1);
  KernelResult result{at::empty_like(q),
                      at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat))};
  for (int64_t g = 0; g < group; ++g) {
    auto part = at::_scaled_dot_product_efficient_attention(heads_of_group(q, g, group), in.k, in.v,
                                                            /*attn_bias=*/{}, /*compute_log_sumexp=*/true,
                                                            kNoDropout, causal);
    heads_of_group(result.out, g, group).copy_(std::get<0>(part));
    heads_of_group(result.log_sum_exp, g, group).copy_(std::get<1>(part).narrow(2, 0, q.size(2)));
  }
  return result;
}

Qkv efficient_backward(const Tensor& grad, const Qkv& in, const KernelResult& result, bool causal) {
  const int64_t group = in.q.size(1) / in.k.size(1), rest = -in.q.size(2) % kEfficientAlignment;
  const Tensor padded = rest == 0 ? result.log_sum_exp
                                  : at::constant_pad_nd(result.log_sum_exp, {0, rest + kEfficientAlignment});
  Qkv grads{at::empty_like(in.q), at::zeros_like(in.k), at::zeros_like(in.v)};
  for (int64_t g = 0; g < group; ++g) {
    const auto mine = [&](const Tensor& x) { return heads_of_group(x, g, group); };
    auto part = at::_scaled_dot_product_efficient_attention_backward(
        mine(grad), mine(in.q), in.k, in.v, /*attn_bias=*/{}, mine(result.out), mine(padded).contiguous(),
        no_seed(in.q), no_seed(in.q), kNoDropout, /*grad_input_mask=*/{true, true, true, false}, causal);
    mine(grads.q).copy_(std::get<0>(part));
    grads.k.add_(std::get<1>(part));
    grads.v.add_(std::get<2>(part));
  }
  return grads;
}

// ---- parts of the keys

// Merges `part` into `into`. Sequence first.
void merge_attention(Tensor& into_BSHD, Tensor& into_log_sum_exp_BHS, const KernelResult& part) {
  static const auto op = find_operator<decltype(composite::merge_attention_)>("titan::merge_attention_");
  op.call(into_BSHD, into_log_sum_exp_BHS, part.out, part.log_sum_exp);
}

// LibTorch's kernels support a causal mask or none. If queries see `first_query` keys before the diagonal,
// these keys are a part without a mask, and the rest is a causal part.
struct KeyRange {
  int64_t first, count;
  bool causal;
};

c10::SmallVector<KeyRange, 2> key_ranges(int64_t num_queries, int64_t num_keys, int64_t first_query) {
  if (first_query >= num_keys - 1) return {{0, num_keys, false}};
  c10::SmallVector<KeyRange, 2> ranges;
  if (first_query > 0) ranges.push_back({0, first_query, false});
  // Keys that no query sees are left out, because kernels disagree about the diagonal of a matrix that isn't
  // square.
  const int64_t on_diagonal = std::min(num_queries, num_keys - first_query);
  TITAN_CHECK(on_diagonal == num_queries, "attention in parts: ", num_queries, " queries from position ",
              first_query, " on see a diagonal of only ", on_diagonal,
              " keys; LibTorch's kernels need a square one, or no mask");
  ranges.push_back({first_query, on_diagonal, true});
  return ranges;
}

// ---- tiles: B batch, K key heads, G query heads per key head, S queries, T keys of a tile, D features

constexpr int64_t kTile = 256;

// The log-sum-exp of queries that see no key of a tile. It is finite, because -inf - -inf isn't a number; a query's own
// tile, which is its last one, outweighs it.
constexpr double kNoKeys = -1e30;

// The number of each token's document, [B, S].
Tensor document_numbers(const Documents& documents, int64_t batch, int64_t length) {
  const Tensor is_start = at::zeros({batch * length + 1}, documents.starts.options());
  is_start.scatter_(0, documents.starts.to(at::kLong), 1);
  return at::cumsum(is_start.narrow(0, 0, batch * length), 0, at::kInt).view({batch, length});
}

// The scaled queries, which all tiles share.
struct TiledQueries {
  int64_t group;
  Tensor q_BKGSD;
  at::ScalarType wide;
  Tensor documents_BS;  // undefined: a row is one document

  TiledQueries(const Qkv& in, const Documents& documents)
      : group(in.q.size(1) / in.k.size(1)),
        q_BKGSD(grouped(in.q) / std::sqrt(static_cast<double>(in.q.size(3)))),
        wide(composite::accumulate_type(in.q)) {
    if (documents) documents_BS = document_numbers(documents, in.q.size(0), in.q.size(2));
  }
  /// Groups the heads of x [B, H, S, ...], in at least fp32.
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
  /// The tile's queries of x [B, K, G, S, ...].
  Tensor queries(const Tensor& x) const { return x.narrow(3, first_query, x.size(3) - first_query); }

  Tensor scores(const TiledQueries& of, const Tensor& keys_BK1TD) const {
    Tensor scores = at::matmul(queries(of.q_BKGSD), keys_BK1TD.transpose(-1, -2));
    if (!causal) return scores;
    Tensor hidden = at::ones({scores.size(-2), count}, scores.options().dtype(at::kBool)).triu_(1);
    if (of.documents_BS.defined()) hidden = hidden.logical_or(elsewhere(of.documents_BS));
    return scores.masked_fill_(hidden, -std::numeric_limits<double>::infinity());
  }

 private:
  // Whether a key isn't in the query's document, [B, 1, 1, S, T].
  Tensor elsewhere(const Tensor& documents_BS) const {
    const Tensor of_queries = documents_BS.narrow(1, first_query, documents_BS.size(1) - first_query),
                 of_keys = documents_BS.narrow(1, first, count);
    return of_queries.unsqueeze(-1).ne(of_keys.unsqueeze(1)).unsqueeze(1).unsqueeze(1);
  }
};

template <class Visit>
void for_each_tile(const Qkv& in, bool causal, Visit visit) {
  const int64_t keys = causal ? std::min(in.k.size(2), in.q.size(2)) : in.k.size(2);
  for (int64_t first = 0; first < keys; first += kTile)
    visit(Tile{first, std::min(kTile, keys - first), causal ? first : 0, causal});
}

// FlashAttention takes documents of all heads that it or cuDNN takes without them. cuDNN itself isn't called: it would
// build a plan for each number of documents and each longest one, so in nearly every step.
bool have_document_kernel(const Qkv& in, const Documents& documents) {
  // Each is one of a grid's blocks in a dimension that has no more.
  constexpr int64_t most_documents = 65'535;
  if (in.q.is_cpu() || documents.starts.numel() > most_documents + 1) return false;
  const SDPBackend choice = choose(heads_first(in), /*causal=*/true);
  return choice == SDPBackend::flash_attention || choice == SDPBackend::cudnn_attention;
}

}  // namespace

KernelResult run_attention_kernel(const Qkv& given, bool causal) {
  const Qkv in = with_adjacent_features(given);
  if (in.q.is_cpu()) return flash_on_cpu(in, causal);
  const SDPBackend choice = choose(in, causal);
  tell(choice, in.q);
  switch (choice) {
    case SDPBackend::flash_attention:
      return flash(in, causal);
    case SDPBackend::cudnn_attention:
      return cudnn(in, causal);
    case SDPBackend::efficient_attention:
      return efficient(in, causal);
    default:
      return tiled_attention(in, causal);
  }
}

Qkv run_attention_kernel_backward(const Tensor& given_grad, const Qkv& given, const KernelResult& result,
                                  bool causal) {
  const Tensor grad = with_adjacent_features(given_grad);
  const Qkv in = with_adjacent_features(given);
  if (in.q.is_cpu()) return flash_on_cpu_backward(grad, in, result, causal);
  switch (choose(in, causal)) {
    case SDPBackend::flash_attention:
      return flash_backward(grad, in, result, causal);
    case SDPBackend::cudnn_attention:
      return cudnn_backward(grad, in, result, causal);
    case SDPBackend::efficient_attention:
      return efficient_backward(grad, in, result, causal);
    default:
      return tiled_attention_backward(grad, in, result, causal);
  }
}

KernelResult tiled_attention(const Qkv& in, bool causal, const Documents& documents) {
  const TiledQueries of(in, documents);
  const Tensor& q = in.q;
  Tensor out = at::zeros(q.sizes(), q.options().dtype(of.wide));
  Tensor log_sum_exp =
      at::full({q.size(0), q.size(1), q.size(2)}, -std::numeric_limits<double>::infinity(), out.options());
  for_each_tile(in, causal, [&](const Tile& tile) {
    const Tensor scores = tile.scores(of, tile.keys(in.k, of.wide));
    Tensor sums = at::logsumexp(scores, {-1}, /*keepdim=*/true);
    if (documents) sums = at::clamp_min(sums, kNoKeys);
    const Tensor part = at::matmul((scores - sums).exp_(), tile.keys(in.v, of.wide));
    const int64_t rows = q.size(2) - tile.first_query;
    Tensor into = heads_first(out.narrow(2, tile.first_query, rows)),
           into_sums = log_sum_exp.narrow(2, tile.first_query, rows);
    merge_attention(into, into_sums, {heads_first(part.flatten(1, 2)), sums.squeeze(-1).flatten(1, 2)});
  });
  return {out.to(q.scalar_type()), log_sum_exp};
}

Qkv tiled_attention_backward(const Tensor& grad, const Qkv& in, const KernelResult& result, bool causal,
                             const Documents& documents) {
  const TiledQueries of(in, documents);
  const double scale = 1 / std::sqrt(static_cast<double>(in.q.size(3)));
  const auto zeros_like = [&](const Tensor& x) { return at::zeros(x.sizes(), x.options().dtype(of.wide)); };
  Qkv grads{zeros_like(in.q), zeros_like(in.k), zeros_like(in.v)};
  const Tensor grad_BKGSD = of.grouped(grad), sums_BKGS1 = of.grouped(result.log_sum_exp).unsqueeze(-1);
  const Tensor delta_BKGS1 = (grad_BKGSD * of.grouped(result.out)).sum(-1, /*keepdim=*/true);
  for_each_tile(in, causal, [&](const Tile& tile) {
    const Tensor keys = tile.keys(in.k, of.wide), values = tile.keys(in.v, of.wide),
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

void attend_by_libtorch(Tensor& out, Tensor& log_sum_exp, const Tensor& q, const Tensor& k, const Tensor& v,
                        int64_t first_query) {
  for (const KeyRange& range : key_ranges(q.size(1), k.size(1), first_query)) {
    const auto keys = [&](const Tensor& x) { return x.narrow(1, range.first, range.count); };
    const KernelResult part = run_attention_kernel(heads_first(Qkv{q, keys(k), keys(v)}), range.causal);
    merge_attention(out, log_sum_exp, {heads_first(part.out), part.log_sum_exp});
  }
}

void attend_backward_by_libtorch(Tensor& grad_q, Tensor& grad_k, Tensor& grad_v, const Tensor& grad,
                                 const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                                 const Tensor& log_sum_exp, int64_t first_query) {
  for (const KeyRange& range : key_ranges(q.size(1), k.size(1), first_query)) {
    const auto keys = [&](const Tensor& x) { return x.narrow(1, range.first, range.count); };
    const Qkv grads =
        heads_first(run_attention_kernel_backward(heads_first(grad), heads_first(Qkv{q, keys(k), keys(v)}),
                                                  {heads_first(out), log_sum_exp}, range.causal));
    grad_q.add_(grads.q);
    keys(grad_k).add_(grads.k);
    keys(grad_v).add_(grads.v);
  }
}

std::tuple<Tensor, Tensor> causal_attention_by_libtorch(const Tensor& q, const Tensor& k, const Tensor& v,
                                                        const std::optional<Tensor>& starts,
                                                        int64_t longest) {
  const Qkv in{q, k, v};
  const Documents documents{starts.value_or(Tensor()), longest};
  if (documents && have_document_kernel(in, documents)) {
    tell(SDPBackend::flash_attention, q, /*documents=*/true);
    const KernelResult result = flash_in_documents(in, documents);
    return {result.out, result.log_sum_exp};
  }
  if (documents && !q.is_cpu()) tell(SDPBackend::math, q, /*documents=*/true);
  const KernelResult result = documents ? tiled_attention(heads_first(in), /*causal=*/true, documents)
                                        : run_attention_kernel(heads_first(in), /*causal=*/true);
  return {heads_first(result.out), result.log_sum_exp};
}

std::tuple<Tensor, Tensor, Tensor> causal_attention_backward_by_libtorch(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
    const Tensor& log_sum_exp, const std::optional<Tensor>& starts, int64_t longest) {
  const Qkv in{q, k, v};
  const Documents documents{starts.value_or(Tensor()), longest};
  if (documents && have_document_kernel(in, documents)) {
    const Qkv grads = flash_in_documents_backward(grad, in, {out, log_sum_exp}, documents);
    return {grads.q, grads.k, grads.v};
  }
  const KernelResult result{heads_first(out), log_sum_exp};
  const Qkv grads =
      heads_first(documents ? tiled_attention_backward(heads_first(grad), heads_first(in), result,
                                                       /*causal=*/true, documents)
                            : run_attention_kernel_backward(heads_first(grad), heads_first(in), result,
                                                            /*causal=*/true));
  return {grads.q, grads.k, grads.v};
}

// ---- documents

// On the host: a step of 64k tokens takes tens of microseconds.
Documents documents_ending_with(int64_t end, const Tensor& tokens_BS, bool pinned) {
  TITAN_CHECK(tokens_BS.is_cpu() && tokens_BS.scalar_type() == at::kLong && tokens_BS.dim() == 2 &&
                  tokens_BS.is_contiguous() && tokens_BS.numel() > 0,
              "documents_ending_with: expected contiguous int64 tokens [B, S] on the host, got ",
              tokens_BS.scalar_type(), " of ", tokens_BS.sizes(), " on ", tokens_BS.device());
  TITAN_CHECK(tokens_BS.numel() <= std::numeric_limits<int32_t>::max(), "documents_ending_with: a batch of ",
              tokens_BS.numel(), " tokens has positions beyond int32");
  const auto* tokens = tokens_BS.const_data_ptr<int64_t>();
  const auto length = static_cast<int32_t>(tokens_BS.size(1)),
             count = static_cast<int32_t>(tokens_BS.numel());
  std::vector<int32_t> starts = {0};
  int32_t longest = 0;
  for (int32_t next = 1; next <= count; ++next) {
    if (tokens[next - 1] != end && next % length != 0) continue;
    longest = std::max(longest, next - starts.back());
    starts.push_back(next);
  }
  Documents documents{
      at::empty({static_cast<int64_t>(starts.size())}, at::TensorOptions(at::kInt).pinned_memory(pinned)),
      longest};
  std::copy(starts.begin(), starts.end(), documents.starts.mutable_data_ptr<int32_t>());
  return documents;
}

// ---- attention as a node of the graph

namespace {

std::optional<Tensor> starts_of(const Documents& documents) {
  return documents ? std::optional(documents.starts) : std::nullopt;
}

// q, k, v and out are [B, S, H, D]; the form of log_sum_exp depends on the kernel.
struct CausalAttentionBackward final : BackwardNode {
  SavedVariable q, k, v, out, log_sum_exp;
  Documents documents;  // all layers share it, so no checkpoint saves anything by dropping it

  variable_list backward(const Tensor& grad) override {
    using Signature = decltype(causal_attention_backward_by_libtorch);
    static const auto op = find_operator<Signature>("titan::causal_attention_backward");
    auto [grad_q, grad_k, grad_v] = op.call(grad, q.unpack(), k.unpack(), v.unpack(), out.unpack(getptr()),
                                            log_sum_exp.unpack(), starts_of(documents), documents.longest);
    return {std::move(grad_q), std::move(grad_k), std::move(grad_v)};
  }
  void release_variables() override {
    for (SavedVariable* saved : {&q, &k, &v, &out, &log_sum_exp}) saved->reset_data();
    documents = {};
  }
  std::string name() const override { return "titan::causal_attention backward"; }
};

void check_shapes(const char* op, const QueriesKeysValues& in, const char* keys) {
  const auto& [q, k, v] = in;
  TITAN_CHECK(q.dim() == 4 && k.dim() == 4 && k.sizes() == v.sizes() && q.size(0) == k.size(0) &&
                  q.size(3) == k.size(3) && k.size(2) > 0 && q.size(2) % k.size(2) == 0,
              op, ": expected q [B, S, H, D] and k, v ", keys, " with H a multiple of K, got ", q.sizes(),
              ", ", k.sizes(), ", ", v.sizes());
}

// Reads no number from a device.
void check_documents(const Documents& documents, const Tensor& q_BSHD) {
  const Tensor& starts = documents.starts;
  TITAN_CHECK(
      starts.scalar_type() == at::kInt && starts.dim() == 1 && starts.is_contiguous() &&
          starts.size(0) > q_BSHD.size(0) && starts.device() == q_BSHD.device(),
      "causal_attention: expected the starts of documents as int32 [N + 1] with at least one document "
      "for each of the ",
      q_BSHD.size(0), " rows, on ", q_BSHD.device(), ", got ", starts.scalar_type(), " of ", starts.sizes(),
      " on ", starts.device());
  TITAN_CHECK(documents.longest > 0 && documents.longest <= q_BSHD.size(1),
              "causal_attention: the longest document can't have ", documents.longest, " tokens in rows of ",
              q_BSHD.size(1));
}

void check_part(const char* op, const QueriesKeysValues& in, int64_t first_query) {
  check_shapes(op, in, "[B, T, K, D]");
  TITAN_CHECK(in.k.size(1) > 0, op, ": there are no keys");
  TITAN_CHECK(first_query >= 0, op, ": first_query is ", first_query,
              ", so that the first query sees no key; leave such queries out");
}

}  // namespace

// A checkpoint may keep both results ([Note: kept outputs]).
at::Tensor causal_attention(const at::Tensor& q_BSHD, const at::Tensor& k_BSKD, const at::Tensor& v_BSKD,
                            const Documents& documents) {
  const QueriesKeysValues in{q_BSHD, k_BSKD, v_BSKD};
  check_shapes("causal_attention", in, "[B, S, K, D]");
  TITAN_CHECK(q_BSHD.size(1) == k_BSKD.size(1), "causal_attention: ", q_BSHD.size(1), " queries and ",
              k_BSKD.size(1), " keys; expected as many");
  if (documents) check_documents(documents, q_BSHD);
  using Signature = decltype(causal_attention_by_libtorch);
  static const auto op = find_operator<Signature>("titan::causal_attention");
  std::shared_ptr<CausalAttentionBackward> node;
  if (compute_requires_grad(in.q, in.k, in.v)) {
    node = make_node<CausalAttentionBackward>(in.q, in.k, in.v);
    node->q = save_input(in.q);
    node->k = save_input(in.k);
    node->v = save_input(in.v);
    node->documents = documents;
  }
  const auto [out, log_sum_exp] = kept(KeptKind::Attention, {}, [&] {
    return op.call(in.q, in.k, in.v, starts_of(documents), documents.longest);
  });
  if (!node) return out;
  set_history(out, node);
  node->out = SavedVariable(out, /*is_output=*/true);
  node->log_sum_exp = save_input(log_sum_exp);
  return out;
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
  static const auto op = find_operator<decltype(attend_by_libtorch)>("titan::attend_");
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
  static const auto op = find_operator<decltype(attend_backward_by_libtorch)>("titan::attend_backward_");
  BelowAutograd guard;
  at::Tensor grad_q = grads.q_BSHD, grad_k = grads.k_BTKD, grad_v = grads.v_BTKD;
  op.call(grad_q, grad_k, grad_v, grad_BSHD, in.q, in.k, in.v, all_keys.out_BSHD, all_keys.log_sum_exp_BHS,
          first_query);
}

}  // namespace titan::ops

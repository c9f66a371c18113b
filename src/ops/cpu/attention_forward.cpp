// See [Note: flash attention] in attention_kernel.h.

#include <limits>

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>

#include "ops/cpu/attention_kernel.h"

namespace titan::ops::cpu {

namespace {

using simd::kPanel;

using Shape = AttentionShape;

constexpr float kLowest = std::numeric_limits<float>::lowest();

// Replaces a row of scores by exp(score - maximum), with zeros where the query doesn't look; returns the
// factor by which earlier results must be scaled.
template <class V>
TITAN_INLINE float softmax_row(float* scores, int64_t seen, int64_t width, float& maximum, float& sum) {
  constexpr int64_t lanes = simd::kFloatsOf<V>;
  simd::IntsOf<V> lane;
  for (int i = 0; i < lanes; ++i) lane[i] = i;
  V best = simd::broadcast<V>(maximum);
  for (int64_t j = 0; j < seen; j += lanes) {
    const V s = simd::load_vector<V>(scores + j);
    const V looked_at = lane < static_cast<int>(seen - j) ? s : best;
    best = looked_at > best ? looked_at : best;
  }
  const float top = simd::largest(best);
  const float correction = maximum == kLowest ? 0.0f : std::exp(maximum - top);
  V total{};
  for (int64_t j = 0; j < seen; j += lanes) {
    V p = simd::exp(simd::load_vector<V>(scores + j) - top);
    p = lane < static_cast<int>(seen - j) ? p : V{};
    total += p;
    simd::store(scores + j, p);
  }
  for (int64_t j = simd::round_up(seen, lanes); j < width; ++j) scores[j] = 0;
  maximum = top;
  sum = sum * correction + simd::sum(total);
  return correction;
}

struct Scratch {
  std::vector<float> keys, values;          // panels of K^T and V of one head
  std::vector<float> queries, scores, out;  // of one block
  std::vector<float> maximum, sum;

  explicit Scratch(const Shape& shape)
      : keys(shape.packed_keys()),
        values(shape.packed_keys()),
        queries(static_cast<size_t>(kQueries * shape.size)),
        scores(static_cast<size_t>(kQueries * kKeysForward)),
        out(static_cast<size_t>(kQueries * shape.padded_size())),
        maximum(kQueries),
        sum(kQueries) {}
};

template <class T>
TITAN_CPU_CLONES void pack_keys_values(Scratch& scratch, const Shape& shape, simd::Rows<const T> k,
                                       simd::Rows<const T> v) {
  simd::pack_transposed_panels(scratch.keys.data(), k, shape.padded_keys());
  simd::pack_panels(scratch.values.data(), v, shape.padded_keys(), 1.0f);
}

// Where a block of queries comes from and goes to.
template <class T, class Out>
struct Block {
  simd::Rows<const T> queries;
  int64_t first;  // query
  simd::Rows<Out> out;
  LogSumRows log_sums;
};

TITAN_INLINE void start_from_nothing(Scratch& scratch) {
  std::fill(scratch.maximum.begin(), scratch.maximum.end(), kLowest);
  std::fill(scratch.sum.begin(), scratch.sum.end(), 0.0f);
  std::fill(scratch.out.begin(), scratch.out.end(), 0.0f);
}

// A finished softmax is a running one whose maximum is its log-sum and whose sum is 1.
template <class T>
TITAN_INLINE void start_from_partial(Scratch& scratch, const Shape& shape, const Block<T, float>& block) {
  for (int64_t i = 0; i < block.out.count; ++i) {
    const float log_sum = block.log_sums.data[i * block.log_sums.stride];
    if (log_sum < kLowest) continue;  // -inf: no key yet
    scratch.maximum[static_cast<size_t>(i)] = log_sum;
    scratch.sum[static_cast<size_t>(i)] = 1;
    std::copy_n(block.out.data + i * block.out.stride, shape.size,
                scratch.out.data() + i * shape.padded_size());
  }
}

template <class V, class T, class Out>
TITAN_INLINE void attend_block_by(const Block<T, Out>& block, Scratch& scratch, const Shape& shape,
                                  AttentionStart start) {
  const int64_t size = shape.size, wide = shape.padded_size(), count = block.queries.count;
  simd::pack_blocks<kQueries>(scratch.queries.data(), block.queries, kQueries, shape.scale());
  start_from_nothing(scratch);
  if constexpr (std::is_same_v<Out, float>) {
    if (start == AttentionStart::Partial) start_from_partial(scratch, shape, block);
  }
  float* scores = scratch.scores.data();
  const int64_t keys = shape.keys_before(block.first + count);
  for (int64_t key = 0; key < keys; key += kKeysForward) {
    const int64_t width = std::min(kKeysForward, simd::round_up(keys - key, kPanel));
    simd::multiply_panels<V, false>({scores, kKeysForward}, {scratch.queries.data(), 1, kQueries},
                                    {scratch.keys.data() + key * size, size * kPanel, width / kPanel},
                                    kQueries, size);
    for (int64_t i = 0; i < kQueries; ++i) {
      const int64_t seen = shape.seen(block.first + i, key, std::min(width, keys - key));
      const auto row = static_cast<size_t>(i);
      const float correction =
          softmax_row<V>(scores + i * kKeysForward, seen, width, scratch.maximum[row], scratch.sum[row]);
      if (correction == 1.0f) continue;
      for (int64_t d = 0; d < wide; ++d) scratch.out[static_cast<size_t>(i * wide + d)] *= correction;
    }
    simd::multiply_panels<V, true>(
        {scratch.out.data(), wide}, {scores, kKeysForward, 1},
        {scratch.values.data() + key * kPanel, shape.padded_keys() * kPanel, shape.size_panels()}, kQueries,
        width);
  }
  for (int64_t i = 0; i < count; ++i) {
    const auto row = static_cast<size_t>(i);
    block.log_sums.data[i * block.log_sums.stride] = scratch.maximum[row] + std::log(scratch.sum[row]);
    simd::unpack_rows<Out>({block.out.data + i * block.out.stride, 0, 1, size}, scratch.out.data() + i * wide,
                           0, 1.0f / scratch.sum[row]);
  }
}

template <class T, class Out>
TITAN_CPU_CLONES void attend_block(const Block<T, Out>& block, Scratch& scratch, const Shape& shape,
                                   AttentionStart start) {
  attend_block_by<simd::Floats>(block, scratch, shape, start);
}
template <class T, class Out>
TITAN_WIDE void attend_block_wide(const Block<T, Out>& block, Scratch& scratch, const Shape& shape,
                                  AttentionStart start) {
  attend_block_by<simd::WideFloats>(block, scratch, shape, start);
}

}  // namespace

template <class T, class Out>
void attention_forward(const AttentionSum& sum, const QueriesKeysValues& in, int64_t first_query,
                       AttentionStart start) {
  const Shape shape(in.q, in.k, first_query);
  const Heads<const T> queries(in.q), keys(in.k), values(in.v);
  const Heads<Out> results(sum.out_BSHD);
  const LogSums sums(sum.log_sum_exp_BHS);
  const int64_t blocks = (shape.queries + kQueries - 1) / kQueries;
  const auto attend = simd::have_wide_vectors() ? attend_block_wide<T, Out> : attend_block<T, Out>;
  at::parallel_for(0, shape.batch * shape.heads * blocks, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch(shape);
    int64_t packed = -1;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item % blocks * kQueries, head = item / blocks % shape.heads,
                    b = item / blocks / shape.heads, kv_head = head / shape.group();
      const int64_t wanted = b * shape.kv_heads + kv_head;
      if (std::exchange(packed, wanted) != wanted)
        pack_keys_values<T>(scratch, shape, keys.rows(b, kv_head, 0, shape.keys, shape.size),
                            values.rows(b, kv_head, 0, shape.keys, shape.size));
      const int64_t count = std::min(kQueries, shape.queries - first);
      attend({.queries = queries.rows(b, head, first, count, shape.size),
              .first = first,
              .out = results.rows(b, head, first, count, shape.size),
              .log_sums = sums.rows(b, head, first)},
             scratch, shape, start);
    }
  });
}

template void attention_forward<float, float>(const AttentionSum&, const QueriesKeysValues&, int64_t,
                                              AttentionStart);
template void attention_forward<c10::BFloat16, c10::BFloat16>(const AttentionSum&, const QueriesKeysValues&,
                                                              int64_t, AttentionStart);
template void attention_forward<c10::BFloat16, float>(const AttentionSum&, const QueriesKeysValues&, int64_t,
                                                      AttentionStart);

}  // namespace titan::ops::cpu

// The attention operators on a CPU. Our kernels compute in fp32, and in bf16 on processors and for sizes of heads
// where they were measured to be as fast or faster, or where LibTorch's products of 16-bit matrices are slow;
// otherwise LibTorch's flash attention does.
//
// [Note: flash attention] (Dao, "FlashAttention-2", 2023.) Scores exist for one block of queries and one
// block of keys at a time. The forward keeps a running maximum and sum for each query and rescales its result
// when the maximum grows. It returns log(sum(exp(score))), from which the backward recomputes the
// probabilities. With delta_i = dO_i . O_i:
//   P = exp(Q K^T - lse)   dV = P^T dO   dP = dO V^T   dS = P (dP - delta)   dQ = dS K   dK = dS^T Q
// The scale 1/sqrt(D) is applied to Q. All five products run on packed panels ([Note: panels]). LibTorch's
// kernel calls a BLAS for each small block, which costs more than the products themselves for heads of 16 to
// 64 features.
//
// A forward may start from the result and lse over other keys, and so continue it. A backward over some of
// the keys takes the lse and O of all keys. In this way a sequence is attended part by part
// (parallel/context).
//
// Within documents, a query's keys start at its document. Blocks of keys that no query of a block sees are left out
// there as they are beyond the diagonal.

#include <algorithm>
#include <limits>
#include <tuple>
#include <type_traits>
#include <vector>

#include <torch/library.h>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include "ops/attention.h"
#include "ops/cpu/panels.h"
#include "ops/cpu_features.h"
#include "titan/core/error.h"

namespace titan::ops {

namespace {

using simd::kPanel;
using simd::LeftFactor;

// ---- how the kernels find a head in memory

/// Queries in a block: a multiple of kTileRows and kPanel, so that a block is whole tiles in both
/// orientations.
constexpr int64_t kQueries = 48;
constexpr int64_t kKeysForward = 96;
constexpr int64_t kKeysBackward = 48;  // its two blocks of scores share the first-level cache

/// Some of a block's keys: first .. end - 1.
struct SeenKeys {
  int64_t first, end;
};

struct Shape {
  int64_t batch, queries, keys, heads, kv_heads, size;
  int64_t first_query;  // query i sees the keys 0 .. first_query + i

  Shape(const at::Tensor& q, const at::Tensor& k, int64_t first_query)
      : batch(q.size(0)),
        queries(q.size(1)),
        keys(k.size(1)),
        heads(q.size(2)),
        kv_heads(k.size(2)),
        size(q.size(3)),
        first_query(first_query) {}

  int64_t group() const { return heads / kv_heads; }
  // Rounded up to whole blocks of the forward and of the backward.
  int64_t padded_queries() const { return simd::round_up(queries, kKeysForward); }
  int64_t padded_keys() const { return simd::round_up(keys, kKeysForward); }
  int64_t padded_size() const { return simd::round_up(size, kPanel); }
  int64_t size_panels() const { return padded_size() / kPanel; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(size)); }
  size_t packed_queries() const { return static_cast<size_t>(padded_queries() * padded_size()); }
  size_t packed_keys() const { return static_cast<size_t>(padded_keys() * padded_size()); }
  /// The keys that query i sees among the `width` keys from `key` on. `first_keys`: of the row (FirstKeys).
  TITAN_INLINE SeenKeys seen(int64_t i, int64_t key, int64_t width, const int32_t* first_keys) const {
    const int64_t end = std::clamp<int64_t>(first_query + i + 1 - key, 0, width);
    const int64_t first = first_keys ? std::max<int64_t>(first_keys[i] - key, 0) : 0;
    return first < end ? SeenKeys{first, end} : SeenKeys{0, 0};
  }
  /// The number of keys that the queries before `end` see.
  int64_t keys_before(int64_t end) const { return std::min(keys, first_query + end); }
  /// The first query that sees `key`, rounded down to the start of its block.
  int64_t first_block_that_sees(int64_t key) const {
    return std::max<int64_t>(0, key - first_query) / kQueries * kQueries;
  }
};

/// The first key that each query sees, which is the start of its document, for all queries up to the last block's end.
class FirstKeys {
 public:
  FirstKeys(const Documents& documents, const Shape& shape) : queries_(shape.padded_queries()) {
    if (!documents) return;
    const auto* starts = documents.starts.const_data_ptr<int32_t>();
    const int64_t count = documents.starts.size(0) - 1;
    TITAN_CHECK(starts[0] == 0 && starts[count] == shape.batch * shape.queries,
                "causal_attention: the documents' starts end at ", starts[count], ", and the batch has ",
                shape.batch * shape.queries, " tokens");
    keys_.resize(static_cast<size_t>(shape.batch * queries_));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = starts[i] / shape.queries, first = starts[i] - row * shape.queries,
                    length = starts[i + 1] - starts[i];
      TITAN_CHECK(length > 0 && first + length <= shape.queries, "causal_attention: the document from ",
                  starts[i], " to ", starts[i + 1], " is empty or isn't in one row of ", shape.queries,
                  " tokens");
      const bool is_last = first + length == shape.queries;
      std::fill_n(keys_.begin() + row * queries_ + first, is_last ? queries_ - first : length,
                  static_cast<int32_t>(first));
    }
  }
  /// Those of a row of the batch; null: all queries see key 0.
  const int32_t* of_row(int64_t row) const { return keys_.empty() ? nullptr : keys_.data() + row * queries_; }

 private:
  int64_t queries_;
  std::vector<int32_t> keys_;
};

/// x [B, S, heads, size] in memory. The features of a head are adjacent, other strides are free. T may be
/// const.
template <class T>
struct Heads {
  T* data;
  int64_t batch_stride, row_stride, head_stride;

  explicit Heads(const at::Tensor& x)
      : data(pointer(x)), batch_stride(x.stride(0)), row_stride(x.stride(1)), head_stride(x.stride(2)) {}
  T* at(int64_t b, int64_t head, int64_t row = 0) const {
    return data + b * batch_stride + head * head_stride + row * row_stride;
  }
  simd::Rows<T> rows(int64_t b, int64_t head, int64_t first, int64_t count, int64_t size) const {
    return {at(b, head, first), row_stride, count, size};
  }

 private:
  static T* pointer(const at::Tensor& x) {
    if constexpr (std::is_const_v<T>) {
      return x.const_data_ptr<std::remove_const_t<T>>();
    } else {
      return x.mutable_data_ptr<T>();
    }
  }
};

/// log(sum(exp(score))) of one head's queries in memory.
struct LogSumRows {
  float* data;
  int64_t stride;
};
/// The same of all heads, [B, H, S].
struct LogSums {
  float* data;
  int64_t batch_stride, head_stride, row_stride;

  explicit LogSums(const at::Tensor& x)
      : data(x.mutable_data_ptr<float>()),
        batch_stride(x.stride(0)),
        head_stride(x.stride(1)),
        row_stride(x.stride(2)) {}
  LogSumRows rows(int64_t b, int64_t head, int64_t first = 0) const {
    return {data + b * batch_stride + head * head_stride + first * row_stride, row_stride};
  }
};

/// The state that the forward starts from.
enum class AttentionStart {
  Nothing,  ///< the sum is only written
  Partial,  ///< the sum is a result over other keys (log_sum_exp -inf: no keys); Out is float
};

// ---- forward

constexpr float kLowest = std::numeric_limits<float>::lowest();

// Replaces a row of scores by exp(score - maximum), with zeros at masked keys. Returns the factor by which
// earlier results must be scaled.
template <class V>
TITAN_INLINE float softmax_row(float* scores, SeenKeys keys, int64_t width, float& maximum, float& sum) {
  const int64_t seen = keys.end;
  std::fill_n(scores, keys.first, kLowest);  // too low to change the maximum or the sum
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
  std::fill_n(scores, keys.first, 0.0f);
  maximum = top;
  sum = sum * correction + simd::sum(total);
  return correction;
}

struct ForwardScratch {
  std::vector<float> keys, values;          // panels of K^T and V of one head
  std::vector<float> queries, scores, out;  // one block each
  std::vector<float> maximum, sum;

  explicit ForwardScratch(const Shape& shape)
      : keys(shape.packed_keys()),
        values(shape.packed_keys()),
        queries(static_cast<size_t>(kQueries * shape.size)),
        scores(static_cast<size_t>(kQueries * kKeysForward)),
        out(static_cast<size_t>(kQueries * shape.padded_size())),
        maximum(kQueries),
        sum(kQueries) {}
};

template <class T>
TITAN_CPU_CLONES void pack_keys_values(ForwardScratch& scratch, const Shape& shape, simd::Rows<const T> k,
                                       simd::Rows<const T> v) {
  simd::pack_transposed_panels(scratch.keys.data(), k, shape.padded_keys());
  simd::pack_panels(scratch.values.data(), v, shape.padded_keys(), 1.0f);
}

// A block of queries in memory, and its results.
template <class T, class Out>
struct Block {
  simd::Rows<const T> queries;
  int64_t first;  // query
  simd::Rows<Out> out;
  LogSumRows log_sums;
  const int32_t* first_keys;  // those of the row
};

TITAN_INLINE void start_from_nothing(ForwardScratch& scratch) {
  std::fill(scratch.maximum.begin(), scratch.maximum.end(), kLowest);
  std::fill(scratch.sum.begin(), scratch.sum.end(), 0.0f);
  std::fill(scratch.out.begin(), scratch.out.end(), 0.0f);
}

// Continues from a finished softmax, which is a running one whose maximum is its log-sum and whose sum is 1.
template <class T>
TITAN_INLINE void start_from_partial(ForwardScratch& scratch, const Shape& shape,
                                     const Block<T, float>& block) {
  for (int64_t i = 0; i < block.out.count; ++i) {
    const float log_sum = block.log_sums.data[i * block.log_sums.stride];
    if (log_sum < kLowest) continue;  // -inf: no keys yet
    scratch.maximum[static_cast<size_t>(i)] = log_sum;
    scratch.sum[static_cast<size_t>(i)] = 1;
    std::copy_n(block.out.data + i * block.out.stride, shape.size,
                scratch.out.data() + i * shape.padded_size());
  }
}

template <class V, class T, class Out>
TITAN_INLINE void attend_block_by(const Block<T, Out>& block, ForwardScratch& scratch, const Shape& shape,
                                  AttentionStart start) {
  const int64_t size = shape.size, wide = shape.padded_size(), count = block.queries.count;
  simd::pack_blocks<kQueries>(scratch.queries.data(), block.queries, kQueries, shape.scale());
  start_from_nothing(scratch);
  if constexpr (std::is_same_v<Out, float>) {
    if (start == AttentionStart::Partial) start_from_partial(scratch, shape, block);
  }
  float* scores = scratch.scores.data();
  const int64_t keys = shape.keys_before(block.first + count);
  // The block's first query sees the first keys.
  const int64_t first_key = block.first_keys ? block.first_keys[block.first] / kPanel * kPanel : 0;
  for (int64_t key = first_key; key < keys; key += kKeysForward) {
    const int64_t width = std::min(kKeysForward, simd::round_up(keys - key, kPanel));
    simd::multiply_panels<V, false>({scores, kKeysForward}, {scratch.queries.data(), 1, kQueries},
                                    {scratch.keys.data() + key * size, size * kPanel, width / kPanel},
                                    kQueries, size);
    for (int64_t i = 0; i < kQueries; ++i) {
      const SeenKeys seen = shape.seen(block.first + i, key, std::min(width, keys - key), block.first_keys);
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
TITAN_CPU_CLONES void attend_block(const Block<T, Out>& block, ForwardScratch& scratch, const Shape& shape,
                                   AttentionStart start) {
  attend_block_by<simd::Floats>(block, scratch, shape, start);
}
template <class T, class Out>
TITAN_WIDE void attend_block_wide(const Block<T, Out>& block, ForwardScratch& scratch, const Shape& shape,
                                  AttentionStart start) {
  attend_block_by<simd::WideFloats>(block, scratch, shape, start);
}

/// sum = softmax(q k^T / sqrt(size)) v over the keys that each query sees and, with AttentionStart::Partial,
/// the keys in `sum`. T: float or BFloat16; Out: T or float. Features are adjacent in all tensors.
template <class T, class Out>
void attention_forward(const AttentionSum& sum, const QueriesKeysValues& in, int64_t first_query,
                       AttentionStart start, const Documents& documents = {}) {
  const Shape shape(in.q, in.k, first_query);
  const FirstKeys first_keys(documents, shape);
  const Heads<const T> queries(in.q), keys(in.k), values(in.v);
  const Heads<Out> results(sum.out_BSHD);
  const LogSums sums(sum.log_sum_exp_BHS);
  const int64_t blocks = (shape.queries + kQueries - 1) / kQueries;
  const auto attend = simd::have_wide_vectors() ? attend_block_wide<T, Out> : attend_block<T, Out>;
  at::parallel_for(0, shape.batch * shape.heads * blocks, 1, [&](int64_t begin, int64_t end) {
    ForwardScratch scratch(shape);
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
              .log_sums = sums.rows(b, head, first),
              .first_keys = first_keys.of_row(b)},
             scratch, shape, start);
    }
  });
}

// ---- backward

/// The forward's results over all keys and the gradient of `out`.
struct AttentionOutputs {
  at::Tensor grad, out, log_sum_exp;
};

struct BackwardScratch {
  std::vector<float> keys, keys_t, values_t;  // panels of K, K^T, V^T of one head
  // Q (scaled) and dO of one head, as blocks and as panels.
  std::vector<float> queries, query_panels, grads, grad_panels;
  std::vector<float> log_sum_exp, delta;
  std::vector<float> grad_q, grad_k, grad_v;      // [padded length, padded size]
  std::vector<float> probabilities, grad_scores;  // one block each

  explicit BackwardScratch(const Shape& shape) {
    for (auto* packed : {&keys, &keys_t, &values_t, &grad_k, &grad_v}) packed->resize(shape.packed_keys());
    for (auto* packed : {&queries, &query_panels, &grads, &grad_panels, &grad_q})
      packed->resize(shape.packed_queries());
    for (auto* row : {&log_sum_exp, &delta}) row->resize(static_cast<size_t>(shape.padded_queries()));
    for (auto* block : {&probabilities, &grad_scores}) block->resize(kQueries * kKeysBackward);
  }
};

template <class T>
TITAN_CPU_CLONES void pack_keys_values(BackwardScratch& scratch, const Shape& shape, simd::Rows<const T> k,
                                       simd::Rows<const T> v) {
  simd::pack_panels(scratch.keys.data(), k, shape.padded_keys(), 1.0f);
  simd::pack_transposed_panels(scratch.keys_t.data(), k, shape.padded_keys());
  simd::pack_transposed_panels(scratch.values_t.data(), v, shape.padded_keys());
  std::fill(scratch.grad_k.begin(), scratch.grad_k.end(), 0.0f);
  std::fill(scratch.grad_v.begin(), scratch.grad_v.end(), 0.0f);
}

// One head's queries and their results.
template <class T>
struct QueryRows {
  simd::Rows<const T> q, grad, out;
  LogSumRows log_sums;
};

template <class T>
TITAN_CPU_CLONES void pack_queries(BackwardScratch& scratch, const Shape& shape, const QueryRows<T>& rows) {
  simd::pack_blocks<kQueries>(scratch.queries.data(), rows.q, shape.padded_queries(), shape.scale());
  simd::pack_panels(scratch.query_panels.data(), rows.q, shape.padded_queries(), shape.scale());
  simd::pack_blocks<kQueries>(scratch.grads.data(), rows.grad, shape.padded_queries(), 1.0f);
  simd::pack_panels(scratch.grad_panels.data(), rows.grad, shape.padded_queries(), 1.0f);
  for (int64_t row = 0; row < shape.queries; ++row) {
    float dot = 0;
    for (int64_t d = 0; d < shape.size; ++d)
      dot += static_cast<float>(rows.out.data[row * rows.out.stride + d]) *
             static_cast<float>(rows.grad.data[row * rows.grad.stride + d]);
    scratch.delta[static_cast<size_t>(row)] = dot;
    scratch.log_sum_exp[static_cast<size_t>(row)] = rows.log_sums.data[row * rows.log_sums.stride];
  }
  std::fill(scratch.grad_q.begin(), scratch.grad_q.end(), 0.0f);
}

// Replaces scores by probabilities, and gradients of probabilities by gradients of scores.
template <class V>
TITAN_INLINE void probabilities_of_block(BackwardScratch& scratch, const Shape& shape, int64_t query,
                                         int64_t key, const int32_t* first_keys) {
  const int64_t width = std::min(kKeysBackward, shape.keys - key);
  for (int64_t i = 0; i < kQueries; ++i) {
    float *p = scratch.probabilities.data() + i * kKeysBackward,
          *ds = scratch.grad_scores.data() + i * kKeysBackward;
    const float log_sum = scratch.log_sum_exp[static_cast<size_t>(query + i)],
                delta = scratch.delta[static_cast<size_t>(query + i)];
    const SeenKeys seen = shape.seen(query + i, key, width, first_keys);
    constexpr int64_t lanes = simd::kFloatsOf<V>;
    for (int64_t j = seen.first / lanes * lanes; j < seen.end; j += lanes) {
      const V probability = simd::exp(simd::load_vector<V>(p + j) - log_sum);
      simd::store(p + j, probability);
      simd::store(ds + j, probability * (simd::load_vector<V>(ds + j) - delta));
    }
    for (int64_t j = 0; j < seen.first; ++j) p[j] = ds[j] = 0;
    for (int64_t j = seen.end; j < kKeysBackward; ++j) p[j] = ds[j] = 0;
  }
}

// The end of the queries that see any of a block's keys: that of the document of its last key.
TITAN_INLINE int64_t queries_end(const Shape& shape, int64_t key, const int32_t* first_keys) {
  if (!first_keys) return shape.queries;
  const int64_t last = std::min(key + kKeysBackward, shape.keys) - 1;
  return std::upper_bound(first_keys + last, first_keys + shape.queries, last) - first_keys;
}

// Adds the contribution of one head's queries to the gradients of its keys and values, and computes the
// gradients of the queries.
template <class V>
TITAN_INLINE void backward_head_by(BackwardScratch& scratch, const Shape& shape, const int32_t* first_keys) {
  const int64_t size = shape.size, wide = shape.padded_size(), panels = shape.size_panels(),
                panel_of_keys = shape.padded_keys() * kPanel,
                panel_of_queries = shape.padded_queries() * kPanel, key_panels = kKeysBackward / kPanel;
  float *p = scratch.probabilities.data(), *ds = scratch.grad_scores.data();
  for (int64_t key = 0; key < shape.keys; key += kKeysBackward) {
    const int64_t end = queries_end(shape, key, first_keys);
    for (int64_t query = shape.first_block_that_sees(key); query < end; query += kQueries) {
      const LeftFactor q{scratch.queries.data() + query * size, 1, kQueries},
          grad{scratch.grads.data() + query * size, 1, kQueries};
      simd::multiply_panels<V, false>({p, kKeysBackward}, q,
                                      {scratch.keys_t.data() + key * size, size * kPanel, key_panels},
                                      kQueries, size);
      simd::multiply_panels<V, false>({ds, kKeysBackward}, grad,
                                      {scratch.values_t.data() + key * size, size * kPanel, key_panels},
                                      kQueries, size);
      probabilities_of_block<V>(scratch, shape, query, key, first_keys);
      simd::multiply_panels<V, true>({scratch.grad_v.data() + key * wide, wide}, {p, 1, kKeysBackward},
                                     {scratch.grad_panels.data() + query * kPanel, panel_of_queries, panels},
                                     kKeysBackward, kQueries);
      simd::multiply_panels<V, true>({scratch.grad_k.data() + key * wide, wide}, {ds, 1, kKeysBackward},
                                     {scratch.query_panels.data() + query * kPanel, panel_of_queries, panels},
                                     kKeysBackward, kQueries);
      simd::multiply_panels<V, true>({scratch.grad_q.data() + query * wide, wide}, {ds, kKeysBackward, 1},
                                     {scratch.keys.data() + key * kPanel, panel_of_keys, panels}, kQueries,
                                     kKeysBackward);
    }
  }
}

TITAN_CPU_CLONES void backward_head(BackwardScratch& scratch, const Shape& shape, const int32_t* first_keys) {
  backward_head_by<simd::Floats>(scratch, shape, first_keys);
}
TITAN_WIDE void backward_head_wide(BackwardScratch& scratch, const Shape& shape, const int32_t* first_keys) {
  backward_head_by<simd::WideFloats>(scratch, shape, first_keys);
}

// to (+)= scale * from
template <class Out>
TITAN_CPU_CLONES void unpack_gradient(simd::Rows<Out> to, const std::vector<float>& from, const Shape& shape,
                                      float scale, bool add) {
  if constexpr (std::is_same_v<Out, float>) {
    if (add) {
      for (int64_t row = 0; row < to.count; ++row)
        for (int64_t d = 0; d < to.size; ++d)
          to.data[row * to.stride + d] += scale * from[static_cast<size_t>(row * shape.padded_size() + d)];
      return;
    }
  }
  simd::unpack_rows(to, from.data(), shape.padded_size(), scale);
}

// Computes the gradients of q, k and v: written (Out = T) or, with `add`, added to (Out = float). A thread
// processes a key/value head with all query heads that read it, so that no two threads write to one gradient.
template <class T, class Out>
void attention_backward(const QueriesKeysValues& grads, const QueriesKeysValues& in,
                        const AttentionOutputs& results, int64_t first_query, bool add,
                        const Documents& documents = {}) {
  const Shape shape(in.q, in.k, first_query);
  const FirstKeys first_keys(documents, shape);
  const Heads<const T> queries(in.q), keys(in.k), values(in.v), outs(results.out), out_grads(results.grad);
  const Heads<Out> grad_q(grads.q), grad_k(grads.k), grad_v(grads.v);
  const LogSums sums(results.log_sum_exp);
  const auto backward = simd::have_wide_vectors() ? backward_head_wide : backward_head;
  at::parallel_for(0, shape.batch * shape.kv_heads, 1, [&](int64_t begin, int64_t end) {
    BackwardScratch scratch(shape);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t b = item / shape.kv_heads, kv_head = item % shape.kv_heads;
      const auto keys_of = [&](const auto& x) { return x.rows(b, kv_head, 0, shape.keys, shape.size); };
      pack_keys_values<T>(scratch, shape, keys_of(keys), keys_of(values));
      for (int64_t head = kv_head * shape.group(); head < (kv_head + 1) * shape.group(); ++head) {
        const auto queries_of = [&](const auto& x) { return x.rows(b, head, 0, shape.queries, shape.size); };
        pack_queries<T>(scratch, shape,
                        {queries_of(queries), queries_of(out_grads), queries_of(outs), sums.rows(b, head)});
        backward(scratch, shape, first_keys.of_row(b));
        unpack_gradient<Out>(queries_of(grad_q), scratch.grad_q, shape, shape.scale(), add);
      }
      unpack_gradient<Out>(keys_of(grad_k), scratch.grad_k, shape, 1.0f, add);
      unpack_gradient<Out>(keys_of(grad_v), scratch.grad_v, shape, 1.0f, add);
    }
  });
}

// ---- the operators

// The most features of a head with which our kernel is as fast as LibTorch's or faster, in bf16 on Intel processors with AVX-512,
// which may have units for such products (docs/decisions/cpu_attention.md has the times).
constexpr int64_t kOwnForward = 16, kOwnBackward = 64;

// LibTorch's kernel can't leave out what is between documents.
bool have_own_kernel(const at::Tensor& q, int64_t most_features, bool in_documents = false) {
  if (q.scalar_type() != at::kBFloat16) return q.scalar_type() == at::kFloat;
  return in_documents || !cpu_features().fast_16bit_products || cpu_features().amd ||
         (cpu_features().avx512 && q.size(3) <= most_features);
}

template <class Kernel>
void dispatch_own(const at::Tensor& q, Kernel&& kernel) {
  if (q.scalar_type() == at::kFloat) return kernel(static_cast<float*>(nullptr));
  kernel(static_cast<c10::BFloat16*>(nullptr));
}

std::tuple<at::Tensor, at::Tensor> causal_attention_cpu(const at::Tensor& q, const at::Tensor& k,
                                                        const at::Tensor& v,
                                                        const std::optional<at::Tensor>& starts,
                                                        int64_t longest) {
  if (!have_own_kernel(q, kOwnForward, starts.has_value()))
    return causal_attention_by_libtorch(q, k, v, starts, longest);
  const AttentionSum sum{at::empty(q.sizes(), q.options()),
                         at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(at::kFloat))};
  dispatch_own(q, [&]<class T>(T*) {
    attention_forward<T, T>(sum, with_adjacent_features({q, k, v}), /*first_query=*/0,
                            AttentionStart::Nothing, {starts.value_or(at::Tensor()), longest});
  });
  return {sum.out_BSHD, sum.log_sum_exp_BHS};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> causal_attention_backward_cpu(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& log_sum_exp, const std::optional<at::Tensor>& starts,
    int64_t longest) {
  if (!have_own_kernel(q, kOwnBackward, starts.has_value()))
    return causal_attention_backward_by_libtorch(grad, q, k, v, out, log_sum_exp, starts, longest);
  const QueriesKeysValues grads{at::empty(q.sizes(), q.options()), at::empty(k.sizes(), k.options()),
                                at::empty(v.sizes(), v.options())};
  dispatch_own(q, [&]<class T>(T*) {
    attention_backward<T, T>(grads, with_adjacent_features({q, k, v}),
                             {.grad = with_adjacent_features(grad),
                              .out = with_adjacent_features(out),
                              .log_sum_exp = log_sum_exp},
                             /*first_query=*/0, /*add=*/false, {starts.value_or(at::Tensor()), longest});
  });
  return {grads.q, grads.k, grads.v};
}

void attend_cpu(at::Tensor& out, at::Tensor& log_sum_exp, const at::Tensor& q, const at::Tensor& k,
                const at::Tensor& v, int64_t first_query) {
  if (!have_own_kernel(q, kOwnForward)) return attend_by_libtorch(out, log_sum_exp, q, k, v, first_query);
  dispatch_own(q, [&]<class T>(T*) {
    attention_forward<T, float>({out, log_sum_exp}, with_adjacent_features({q, k, v}), first_query,
                                AttentionStart::Partial);
  });
}

void attend_backward_cpu(at::Tensor& grad_q, at::Tensor& grad_k, at::Tensor& grad_v, const at::Tensor& grad,
                         const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                         const at::Tensor& log_sum_exp, int64_t first_query) {
  if (!have_own_kernel(q, kOwnBackward))
    return attend_backward_by_libtorch(grad_q, grad_k, grad_v, grad, q, k, v, out, log_sum_exp, first_query);
  dispatch_own(q, [&]<class T>(T*) {
    attention_backward<T, float>({grad_q, grad_k, grad_v}, with_adjacent_features({q, k, v}),
                                 {.grad = with_adjacent_features(grad),
                                  .out = with_adjacent_features(out),
                                  .log_sum_exp = log_sum_exp},
                                 first_query, /*add=*/true);
  });
}

TORCH_LIBRARY_IMPL(titan, CPU, m) {
  m.impl("causal_attention", causal_attention_cpu);
  m.impl("causal_attention_backward", causal_attention_backward_cpu);
  m.impl("attend_", attend_cpu);
  m.impl("attend_backward_", attend_backward_cpu);
}

}  // namespace
}  // namespace titan::ops

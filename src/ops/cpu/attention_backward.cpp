// See [Note: flash attention] in attention_kernel.h.

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>

#include "ops/cpu/attention_kernel.h"

namespace titan::ops::cpu {

namespace {

using simd::kPanel;
using simd::LeftFactor;

using Shape = AttentionShape;

struct Scratch {
  std::vector<float> keys, keys_t, values_t;  // panels of K, K^T, V^T of one head
  // Q (scaled) and dO of one head: blocks, and panels.
  std::vector<float> queries, query_panels, grads, grad_panels;
  std::vector<float> log_sum_exp, delta;
  std::vector<float> grad_q, grad_k, grad_v;      // [padded length, padded size]
  std::vector<float> probabilities, grad_scores;  // of one block

  explicit Scratch(const Shape& shape) {
    for (auto* packed : {&keys, &keys_t, &values_t, &grad_k, &grad_v}) packed->resize(shape.packed_keys());
    for (auto* packed : {&queries, &query_panels, &grads, &grad_panels, &grad_q})
      packed->resize(shape.packed_queries());
    for (auto* row : {&log_sum_exp, &delta}) row->resize(static_cast<size_t>(shape.padded_queries()));
    for (auto* block : {&probabilities, &grad_scores}) block->resize(kQueries * kKeysBackward);
  }
};

template <class T>
TITAN_CPU_CLONES void pack_keys_values(Scratch& scratch, const Shape& shape, simd::Rows<const T> k,
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
TITAN_CPU_CLONES void pack_queries(Scratch& scratch, const Shape& shape, const QueryRows<T>& rows) {
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

// Replaces scores by probabilities, and the gradients of probabilities by those of scores.
template <class V>
TITAN_INLINE void probabilities_of_block(Scratch& scratch, const Shape& shape, int64_t query, int64_t key) {
  const int64_t width = std::min(kKeysBackward, shape.keys - key);
  for (int64_t i = 0; i < kQueries; ++i) {
    float *p = scratch.probabilities.data() + i * kKeysBackward,
          *ds = scratch.grad_scores.data() + i * kKeysBackward;
    const float log_sum = scratch.log_sum_exp[static_cast<size_t>(query + i)],
                delta = scratch.delta[static_cast<size_t>(query + i)];
    const int64_t seen = shape.seen(query + i, key, width);
    for (int64_t j = 0; j < seen; j += simd::kFloatsOf<V>) {
      const V probability = simd::exp(simd::load_vector<V>(p + j) - log_sum);
      simd::store(p + j, probability);
      simd::store(ds + j, probability * (simd::load_vector<V>(ds + j) - delta));
    }
    for (int64_t j = seen; j < kKeysBackward; ++j) p[j] = ds[j] = 0;
  }
}

// Adds one head's queries to the gradients of its keys and values, and computes their own.
template <class V>
TITAN_INLINE void backward_head_by(Scratch& scratch, const Shape& shape) {
  const int64_t size = shape.size, wide = shape.padded_size(), panels = shape.size_panels(),
                panel_of_keys = shape.padded_keys() * kPanel,
                panel_of_queries = shape.padded_queries() * kPanel, key_panels = kKeysBackward / kPanel;
  float *p = scratch.probabilities.data(), *ds = scratch.grad_scores.data();
  for (int64_t key = 0; key < shape.keys; key += kKeysBackward) {
    for (int64_t query = shape.first_block_that_sees(key); query < shape.queries; query += kQueries) {
      const LeftFactor q{scratch.queries.data() + query * size, 1, kQueries},
          grad{scratch.grads.data() + query * size, 1, kQueries};
      simd::multiply_panels<V, false>({p, kKeysBackward}, q,
                                      {scratch.keys_t.data() + key * size, size * kPanel, key_panels},
                                      kQueries, size);
      simd::multiply_panels<V, false>({ds, kKeysBackward}, grad,
                                      {scratch.values_t.data() + key * size, size * kPanel, key_panels},
                                      kQueries, size);
      probabilities_of_block<V>(scratch, shape, query, key);
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

TITAN_CPU_CLONES void backward_head(Scratch& scratch, const Shape& shape) {
  backward_head_by<simd::Floats>(scratch, shape);
}
TITAN_WIDE void backward_head_wide(Scratch& scratch, const Shape& shape) {
  backward_head_by<simd::WideFloats>(scratch, shape);
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

}  // namespace

// A thread takes the key/value heads one by one with all query heads that read them, so that no two threads
// write to one gradient.
template <class T, class Out>
void attention_backward(const QueriesKeysValues& grads, const QueriesKeysValues& in,
                        const AttentionOutputs& results, int64_t first_query, bool add) {
  const Shape shape(in.q, in.k, first_query);
  const Heads<const T> queries(in.q), keys(in.k), values(in.v), outs(results.out), out_grads(results.grad);
  const Heads<Out> grad_q(grads.q), grad_k(grads.k), grad_v(grads.v);
  const LogSums sums(results.log_sum_exp);
  const auto backward = simd::have_wide_vectors() ? backward_head_wide : backward_head;
  at::parallel_for(0, shape.batch * shape.kv_heads, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch(shape);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t b = item / shape.kv_heads, kv_head = item % shape.kv_heads;
      const auto keys_of = [&](const auto& x) { return x.rows(b, kv_head, 0, shape.keys, shape.size); };
      pack_keys_values<T>(scratch, shape, keys_of(keys), keys_of(values));
      for (int64_t head = kv_head * shape.group(); head < (kv_head + 1) * shape.group(); ++head) {
        const auto queries_of = [&](const auto& x) { return x.rows(b, head, 0, shape.queries, shape.size); };
        pack_queries<T>(scratch, shape,
                        {queries_of(queries), queries_of(out_grads), queries_of(outs), sums.rows(b, head)});
        backward(scratch, shape);
        unpack_gradient<Out>(queries_of(grad_q), scratch.grad_q, shape, shape.scale(), add);
      }
      unpack_gradient<Out>(keys_of(grad_k), scratch.grad_k, shape, 1.0f, add);
      unpack_gradient<Out>(keys_of(grad_v), scratch.grad_v, shape, 1.0f, add);
    }
  });
}

template void attention_backward<float, float>(const QueriesKeysValues&, const QueriesKeysValues&,
                                               const AttentionOutputs&, int64_t, bool);
template void attention_backward<c10::BFloat16, c10::BFloat16>(const QueriesKeysValues&,
                                                               const QueriesKeysValues&,
                                                               const AttentionOutputs&, int64_t, bool);
template void attention_backward<c10::BFloat16, float>(const QueriesKeysValues&, const QueriesKeysValues&,
                                                       const AttentionOutputs&, int64_t, bool);

}  // namespace titan::ops::cpu

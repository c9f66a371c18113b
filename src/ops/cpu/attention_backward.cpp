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
  std::vector<float> queries, query_panels, grads,
      grad_panels;  // Q (scaled) and dO of one head: blocks, and panels
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
TITAN_CPU_CLONES void pack_keys_values(Scratch& scratch, const Shape& shape, simd::Rows<T> k,
                                       simd::Rows<T> v) {
  simd::pack_panels(scratch.keys.data(), k, shape.padded_keys(), 1.0f);
  simd::pack_transposed_panels(scratch.keys_t.data(), k, shape.padded_keys());
  simd::pack_transposed_panels(scratch.values_t.data(), v, shape.padded_keys());
  std::fill(scratch.grad_k.begin(), scratch.grad_k.end(), 0.0f);
  std::fill(scratch.grad_v.begin(), scratch.grad_v.end(), 0.0f);
}

template <class T>
TITAN_CPU_CLONES void pack_queries(Scratch& scratch, const Shape& shape, simd::Rows<T> q, simd::Rows<T> grad,
                                   simd::Rows<T> out, const float* log_sum_exp, int64_t sum_stride) {
  simd::pack_blocks<kQueries>(scratch.queries.data(), q, shape.padded_queries(), shape.scale());
  simd::pack_panels(scratch.query_panels.data(), q, shape.padded_queries(), shape.scale());
  simd::pack_blocks<kQueries>(scratch.grads.data(), grad, shape.padded_queries(), 1.0f);
  simd::pack_panels(scratch.grad_panels.data(), grad, shape.padded_queries(), 1.0f);
  for (int64_t row = 0; row < shape.queries; ++row) {
    float dot = 0;
    for (int64_t d = 0; d < shape.size; ++d)
      dot += static_cast<float>(out.data[row * out.stride + d]) *
             static_cast<float>(grad.data[row * grad.stride + d]);
    scratch.delta[static_cast<size_t>(row)] = dot;
    scratch.log_sum_exp[static_cast<size_t>(row)] = log_sum_exp[row * sum_stride];
  }
  std::fill(scratch.grad_q.begin(), scratch.grad_q.end(), 0.0f);
}

// Scores -> probabilities, and their gradients -> those of the scores.
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

// Adds one head's queries to the gradients of its keys and values, and makes its own.
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
      simd::multiply_panels<V, false>(p, kKeysBackward, q, scratch.keys_t.data() + key * size, size * kPanel,
                                      kQueries, size, key_panels);
      simd::multiply_panels<V, false>(ds, kKeysBackward, grad, scratch.values_t.data() + key * size,
                                      size * kPanel, kQueries, size, key_panels);
      probabilities_of_block<V>(scratch, shape, query, key);
      simd::multiply_panels<V, true>(scratch.grad_v.data() + key * wide, wide, {p, 1, kKeysBackward},
                                     scratch.grad_panels.data() + query * kPanel, panel_of_queries,
                                     kKeysBackward, kQueries, panels);
      simd::multiply_panels<V, true>(scratch.grad_k.data() + key * wide, wide, {ds, 1, kKeysBackward},
                                     scratch.query_panels.data() + query * kPanel, panel_of_queries,
                                     kKeysBackward, kQueries, panels);
      simd::multiply_panels<V, true>(scratch.grad_q.data() + query * wide, wide, {ds, kKeysBackward, 1},
                                     scratch.keys.data() + key * kPanel, panel_of_keys, kQueries,
                                     kKeysBackward, panels);
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
TITAN_CPU_CLONES void unpack_gradient(Out* to, int64_t stride, const std::vector<float>& from,
                                      const Shape& shape, int64_t rows, float scale, bool add) {
  if constexpr (std::is_same_v<Out, float>) {
    if (add) {
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t d = 0; d < shape.size; ++d)
          to[row * stride + d] += scale * from[static_cast<size_t>(row * shape.padded_size() + d)];
      return;
    }
  }
  simd::unpack_rows(to, stride, from.data(), shape.padded_size(), rows, shape.size, scale);
}

}  // namespace

// A thread takes the key/value heads one by one with all query heads that read them, so no two write to one
// gradient.
template <class T, class Out>
void attention_backward(const AttentionGradTensors& grads, const at::Tensor& grad, const at::Tensor& q,
                        const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                        const at::Tensor& log_sum_exp, int64_t first_query, bool add) {
  const Shape shape(q, k, first_query);
  const Heads<const T> queries(q), keys(k), values(v), outs(out), out_grads(grad);
  const Heads<Out> grad_q(grads.q), grad_k(grads.k), grad_v(grads.v);
  const LogSums sums(log_sum_exp);
  const auto backward = simd::have_wide_vectors() ? backward_head_wide : backward_head;
  at::parallel_for(0, shape.batch * shape.kv_heads, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch(shape);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t b = item / shape.kv_heads, kv_head = item % shape.kv_heads;
      const auto keys_of = [&](const Heads<const T>& x) {
        return x.rows(b, kv_head, 0, shape.keys, shape.size);
      };
      pack_keys_values<T>(scratch, shape, keys_of(keys), keys_of(values));
      for (int64_t head = kv_head * shape.group(); head < (kv_head + 1) * shape.group(); ++head) {
        const auto queries_of = [&](const Heads<const T>& x) {
          return x.rows(b, head, 0, shape.queries, shape.size);
        };
        pack_queries<T>(scratch, shape, queries_of(queries), queries_of(out_grads), queries_of(outs),
                        sums.at(b, head), sums.row_stride);
        backward(scratch, shape);
        unpack_gradient<Out>(grad_q.at(b, head), grad_q.row_stride, scratch.grad_q, shape, shape.queries,
                             shape.scale(), add);
      }
      unpack_gradient<Out>(grad_k.at(b, kv_head), grad_k.row_stride, scratch.grad_k, shape, shape.keys, 1.0f,
                           add);
      unpack_gradient<Out>(grad_v.at(b, kv_head), grad_v.row_stride, scratch.grad_v, shape, shape.keys, 1.0f,
                           add);
    }
  });
}

template void attention_backward<float, float>(const AttentionGradTensors&, const at::Tensor&,
                                               const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                               const at::Tensor&, const at::Tensor&, int64_t, bool);
template void attention_backward<c10::BFloat16, c10::BFloat16>(const AttentionGradTensors&, const at::Tensor&,
                                                               const at::Tensor&, const at::Tensor&,
                                                               const at::Tensor&, const at::Tensor&,
                                                               const at::Tensor&, int64_t, bool);
template void attention_backward<c10::BFloat16, float>(const AttentionGradTensors&, const at::Tensor&,
                                                       const at::Tensor&, const at::Tensor&,
                                                       const at::Tensor&, const at::Tensor&,
                                                       const at::Tensor&, int64_t, bool);

}  // namespace titan::ops::cpu

// Causal attention in fp32 on a CPU.
//
// [Note: flash attention] (Dao, "FlashAttention-2", 2023.) Scores exist for one block of queries and one of
// keys at a time. The forward keeps a running maximum and sum for each query and rescales what it has when
// the maximum grows; it leaves log(sum(exp(score))), from which the backward makes the probabilities anew.
// With delta_i = dO_i . O_i:
//   P = exp(Q K^T - lse)   dV = P^T dO   dP = dO V^T   dS = P (dP - delta)   dQ = dS K   dK = dS^T Q
// The scale 1/sqrt(D) is taken into Q. All five products run on packed panels ([Note: panels]). LibTorch's
// kernel calls a BLAS for each small block, which costs more than the products themselves for heads of 16 to
// 64 features.

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include <torch/library.h>

#include <ATen/Parallel.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>

#include "ops/composite.h"
#include "ops/cpu/dtype.h"
#include "ops/cpu/small_products.h"
#include "ops/cpu_features.h"

namespace titan::ops {

namespace {

using simd::Floats;
using simd::kPanel;
using simd::LeftFactor;

constexpr int64_t kQueries =
    48;  // of a block: multiples of 6 and 16, so that a block is a whole number of tiles either way up
constexpr int64_t kKeysForward = 96;
constexpr int64_t kKeysBackward = 48;  // its two blocks of scores share the first-level cache
constexpr float kLowest = std::numeric_limits<float>::lowest();

struct Shape {
  int64_t batch, length, heads, kv_heads, size;
  Shape(const at::Tensor& q, const at::Tensor& k)
      : batch(q.size(0)), length(q.size(1)), heads(q.size(2)), kv_heads(k.size(2)), size(q.size(3)) {}
  int64_t group() const { return heads / kv_heads; }
  int64_t padded_length() const { return simd::round_up(length, kKeysForward); }
  int64_t padded_size() const { return simd::round_up(size, kPanel); }
  int64_t size_panels() const { return padded_size() / kPanel; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(size)); }
  size_t packed() const { return static_cast<size_t>(padded_length() * padded_size()); }
  /// Head `head` of `count` in x [batch, length, count, size].
  template <class T>
  simd::Rows<T> rows(const T* x, int64_t b, int64_t head, int64_t count) const {
    return {x + (b * length * count + head) * size, count * size, length, size};
  }
};

// ---- forward

// Turns a row of scores into exp(score - maximum), with zeros where the query doesn't look; returns how what
// came before has to be scaled.
TITAN_INLINE float softmax_row(float* scores, int64_t seen, int64_t width, float& maximum, float& sum) {
  Floats best = simd::broadcast<Floats>(maximum);
  for (int64_t j = 0; j < seen; j += 8) {
    const Floats s = simd::load_up_to(scores + j, seen - j, kLowest);
    best = s > best ? s : best;
  }
  const float top = simd::largest(best);
  const float correction = maximum == kLowest ? 0.0f : std::exp(maximum - top);
  Floats total{};
  for (int64_t j = 0; j < seen; j += 8) {
    Floats p = simd::exp(simd::load_up_to(scores + j, seen - j) - top);
    if (seen - j < 8)
      for (int64_t lane = seen - j; lane < 8; ++lane) p[lane] = 0;
    total += p;
    simd::store(scores + j, p);
  }
  for (int64_t j = simd::round_up(seen, 8); j < width; ++j) scores[j] = 0;
  maximum = top;
  sum = sum * correction + simd::sum(total);
  return correction;
}

struct ForwardScratch {
  std::vector<float> keys, values;          // panels of K^T and V of one head
  std::vector<float> queries, scores, out;  // of one block
  std::vector<float> maximum, sum;

  explicit ForwardScratch(const Shape& shape)
      : keys(shape.packed()),
        values(shape.packed()),
        queries(static_cast<size_t>(kQueries * shape.size)),
        scores(static_cast<size_t>(kQueries * kKeysForward)),
        out(static_cast<size_t>(kQueries * shape.padded_size())),
        maximum(kQueries),
        sum(kQueries) {}
};

template <class T>
TITAN_CPU_CLONES void pack_keys_values(ForwardScratch& scratch, const Shape& shape, simd::Rows<T> k,
                                       simd::Rows<T> v) {
  simd::pack_transposed_panels(scratch.keys.data(), k, shape.padded_length());
  simd::pack_panels(scratch.values.data(), v, shape.padded_length(), 1.0f);
}

// One block of queries, from row `first` on.
template <class T>
TITAN_CPU_CLONES void attend_block(T* out, float* log_sum_exp, ForwardScratch& scratch, const Shape& shape,
                                   simd::Rows<T> q, int64_t first) {
  const int64_t size = shape.size, out_stride = shape.padded_size(),
                count = std::min(kQueries, shape.length - first);
  simd::pack_rows(scratch.queries.data(), simd::Rows<T>{q.data + first * q.stride, q.stride, count, size},
                  kQueries, shape.scale());
  std::fill(scratch.maximum.begin(), scratch.maximum.end(), kLowest);
  std::fill(scratch.sum.begin(), scratch.sum.end(), 0.0f);
  std::fill(scratch.out.begin(), scratch.out.end(), 0.0f);
  float* scores = scratch.scores.data();
  for (int64_t key = 0; key < first + count; key += kKeysForward) {
    const int64_t width = std::min(kKeysForward, simd::round_up(first + count - key, kPanel));
    simd::multiply_panels<false>(scores, kKeysForward, {scratch.queries.data(), size, 1},
                                 scratch.keys.data() + key * size, size * kPanel, kQueries, size,
                                 width / kPanel);
    for (int64_t i = 0; i < kQueries; ++i) {
      const int64_t seen = std::clamp<int64_t>(first + i + 1 - key, 0, width);
      const auto row = static_cast<size_t>(i);
      const float correction =
          softmax_row(scores + i * kKeysForward, seen, width, scratch.maximum[row], scratch.sum[row]);
      if (correction == 1.0f) continue;
      for (int64_t d = 0; d < out_stride; ++d)
        scratch.out[static_cast<size_t>(i * out_stride + d)] *= correction;
    }
    simd::multiply_panels<true>(scratch.out.data(), out_stride, {scores, kKeysForward, 1},
                                scratch.values.data() + key * kPanel, shape.padded_length() * kPanel,
                                kQueries, width, shape.size_panels());
  }
  for (int64_t i = 0; i < count; ++i) {
    const auto row = static_cast<size_t>(i);
    log_sum_exp[first + i] = scratch.maximum[row] + std::log(scratch.sum[row]);
    simd::unpack_rows(out + (first + i) * q.stride, 0, scratch.out.data() + i * out_stride, 0, 1, size,
                      1.0f / scratch.sum[row]);
  }
}

template <class T>
void forward_heads(at::Tensor& out, at::Tensor& log_sum_exp, const at::Tensor& q, const at::Tensor& k,
                   const at::Tensor& v) {
  const Shape shape(q, k);
  const int64_t blocks = (shape.length + kQueries - 1) / kQueries;
  at::parallel_for(0, shape.batch * shape.heads * blocks, 1, [&](int64_t begin, int64_t end) {
    ForwardScratch scratch(shape);
    int64_t packed = -1;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t block = item % blocks, head = item / blocks % shape.heads,
                    b = item / blocks / shape.heads;
      const int64_t kv_head = head / shape.group();
      if (std::exchange(packed, b * shape.kv_heads + kv_head) != b * shape.kv_heads + kv_head)
        pack_keys_values<T>(scratch, shape, shape.rows(k.const_data_ptr<T>(), b, kv_head, shape.kv_heads),
                            shape.rows(v.const_data_ptr<T>(), b, kv_head, shape.kv_heads));
      const simd::Rows<T> queries = shape.rows(q.const_data_ptr<T>(), b, head, shape.heads);
      T* to = out.mutable_data_ptr<T>() + (queries.data - q.const_data_ptr<T>());
      float* sums = log_sum_exp.mutable_data_ptr<float>() + (b * shape.heads + head) * shape.length;
      attend_block<T>(to, sums, scratch, shape, queries, block * kQueries);
    }
  });
}

// ---- backward

struct BackwardScratch {
  std::vector<float> keys, keys_t, values_t;  // panels of K, K^T, V^T of one head
  std::vector<float> queries, query_panels, grads,
      grad_panels;  // Q (scaled) and dO of one head: rows, and panels
  std::vector<float> log_sum_exp, delta;
  std::vector<float> grad_q, grad_k, grad_v;      // [padded length, padded size]
  std::vector<float> probabilities, grad_scores;  // of one block

  explicit BackwardScratch(const Shape& shape) {
    for (auto* packed : {&keys, &keys_t, &values_t, &queries, &query_panels, &grads, &grad_panels, &grad_q,
                         &grad_k, &grad_v})
      packed->resize(shape.packed());
    for (auto* row : {&log_sum_exp, &delta}) row->resize(static_cast<size_t>(shape.padded_length()));
    for (auto* block : {&probabilities, &grad_scores}) block->resize(kQueries * kKeysBackward);
  }
};

template <class T>
TITAN_CPU_CLONES void pack_keys_values_for_backward(BackwardScratch& scratch, const Shape& shape,
                                                    simd::Rows<T> k, simd::Rows<T> v) {
  simd::pack_panels(scratch.keys.data(), k, shape.padded_length(), 1.0f);
  simd::pack_transposed_panels(scratch.keys_t.data(), k, shape.padded_length());
  simd::pack_transposed_panels(scratch.values_t.data(), v, shape.padded_length());
  std::fill(scratch.grad_k.begin(), scratch.grad_k.end(), 0.0f);
  std::fill(scratch.grad_v.begin(), scratch.grad_v.end(), 0.0f);
}

template <class T>
TITAN_CPU_CLONES void pack_queries(BackwardScratch& scratch, const Shape& shape, simd::Rows<T> q,
                                   simd::Rows<T> grad, simd::Rows<T> out, const float* log_sum_exp) {
  simd::pack_rows(scratch.queries.data(), q, shape.padded_length(), shape.scale());
  simd::pack_panels(scratch.query_panels.data(), q, shape.padded_length(), shape.scale());
  simd::pack_rows(scratch.grads.data(), grad, shape.padded_length(), 1.0f);
  simd::pack_panels(scratch.grad_panels.data(), grad, shape.padded_length(), 1.0f);
  std::copy_n(log_sum_exp, shape.length, scratch.log_sum_exp.begin());
  for (int64_t row = 0; row < shape.length; ++row) {
    float dot = 0;
    for (int64_t d = 0; d < shape.size; ++d)
      dot += static_cast<float>(out.data[row * out.stride + d]) *
             scratch.grads[static_cast<size_t>(row * shape.size + d)];
    scratch.delta[static_cast<size_t>(row)] = dot;
  }
  std::fill(scratch.grad_q.begin(), scratch.grad_q.end(), 0.0f);
}

// Scores -> probabilities, and their gradients -> those of the scores.
TITAN_INLINE void probabilities_of_block(BackwardScratch& scratch, int64_t query, int64_t key) {
  for (int64_t i = 0; i < kQueries; ++i) {
    float *p = scratch.probabilities.data() + i * kKeysBackward,
          *ds = scratch.grad_scores.data() + i * kKeysBackward;
    const float log_sum = scratch.log_sum_exp[static_cast<size_t>(query + i)],
                delta = scratch.delta[static_cast<size_t>(query + i)];
    const int64_t seen = std::clamp<int64_t>(query + i + 1 - key, 0, kKeysBackward);
    for (int64_t j = 0; j < seen; j += 8) {
      const Floats probability = simd::exp(simd::load(p + j) - log_sum);
      simd::store(p + j, probability);
      simd::store(ds + j, probability * (simd::load(ds + j) - delta));
    }
    for (int64_t j = seen; j < kKeysBackward; ++j) p[j] = ds[j] = 0;
  }
}

// Adds one head's queries to the gradients of its keys and values, and makes its own.
TITAN_CPU_CLONES void backward_head(BackwardScratch& scratch, const Shape& shape) {
  const int64_t size = shape.size, wide = shape.padded_size(), panels = shape.size_panels(),
                panel_stride = shape.padded_length() * kPanel;
  float *p = scratch.probabilities.data(), *ds = scratch.grad_scores.data();
  for (int64_t key = 0; key < shape.length; key += kKeysBackward) {
    for (int64_t query = key / kQueries * kQueries; query < shape.length; query += kQueries) {
      const LeftFactor q{scratch.queries.data() + query * size, size, 1},
          grad{scratch.grads.data() + query * size, size, 1};
      const int64_t key_panels = kKeysBackward / kPanel;
      simd::multiply_panels<false>(p, kKeysBackward, q, scratch.keys_t.data() + key * size, size * kPanel,
                                   kQueries, size, key_panels);
      simd::multiply_panels<false>(ds, kKeysBackward, grad, scratch.values_t.data() + key * size,
                                   size * kPanel, kQueries, size, key_panels);
      probabilities_of_block(scratch, query, key);
      simd::multiply_panels<true>(scratch.grad_v.data() + key * wide, wide, {p, 1, kKeysBackward},
                                  scratch.grad_panels.data() + query * kPanel, panel_stride, kKeysBackward,
                                  kQueries, panels);
      simd::multiply_panels<true>(scratch.grad_k.data() + key * wide, wide, {ds, 1, kKeysBackward},
                                  scratch.query_panels.data() + query * kPanel, panel_stride, kKeysBackward,
                                  kQueries, panels);
      simd::multiply_panels<true>(scratch.grad_q.data() + query * wide, wide, {ds, kKeysBackward, 1},
                                  scratch.keys.data() + key * kPanel, panel_stride, kQueries, kKeysBackward,
                                  panels);
    }
  }
}

template <class T>
TITAN_CPU_CLONES void unpack_gradient(T* to, int64_t stride, const std::vector<float>& from,
                                      const Shape& shape, float scale) {
  simd::unpack_rows(to, stride, from.data(), shape.padded_size(), shape.length, shape.size, scale);
}

struct Gradients {
  at::Tensor q, k, v;
};

// A thread takes the key/value heads one by one with all query heads that read them, so no two write to one
// gradient.
template <class T>
void backward_heads(Gradients& grads, const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k,
                    const at::Tensor& v, const at::Tensor& out, const at::Tensor& log_sum_exp) {
  const Shape shape(q, k);
  const auto at_rows = [](const at::Tensor& tensor, const at::Tensor& like, simd::Rows<T> rows) {
    return tensor.mutable_data_ptr<T>() + (rows.data - like.const_data_ptr<T>());
  };
  at::parallel_for(0, shape.batch * shape.kv_heads, 1, [&](int64_t begin, int64_t end) {
    BackwardScratch scratch(shape);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t b = item / shape.kv_heads, kv_head = item % shape.kv_heads;
      const auto of_head = [&](const at::Tensor& x, int64_t head) {
        return shape.rows(x.const_data_ptr<T>(), b, head, x.size(2));
      };
      const simd::Rows<T> keys = of_head(k, kv_head);
      pack_keys_values_for_backward<T>(scratch, shape, keys, of_head(v, kv_head));
      for (int64_t head = kv_head * shape.group(); head < (kv_head + 1) * shape.group(); ++head) {
        const simd::Rows<T> queries = of_head(q, head);
        const float* sums = log_sum_exp.const_data_ptr<float>() + (b * shape.heads + head) * shape.length;
        pack_queries<T>(scratch, shape, queries, of_head(grad, head), of_head(out, head), sums);
        backward_head(scratch, shape);
        unpack_gradient<T>(at_rows(grads.q, q, queries), queries.stride, scratch.grad_q, shape,
                           shape.scale());
      }
      unpack_gradient<T>(at_rows(grads.k, k, keys), keys.stride, scratch.grad_k, shape, 1.0f);
      unpack_gradient<T>(at_rows(grads.v, k, keys), keys.stride, scratch.grad_v, shape, 1.0f);
    }
  });
}

// ---- operators

bool have_own_kernel(const at::Tensor& q) {
  return q.scalar_type() == at::kFloat ||
         (q.scalar_type() == at::kBFloat16 && !cpu_features().fast_16bit_products);
}

template <class Kernel>
void dispatch_own(const at::Tensor& q, Kernel&& kernel) {
  if (q.scalar_type() == at::kFloat) return kernel(static_cast<float*>(nullptr));
  kernel(static_cast<c10::BFloat16*>(nullptr));
}

// LibTorch's kernels want the heads before the sequence, in any strides.
at::Tensor heads_first(const at::Tensor& x_BSHD) { return x_BSHD.transpose(1, 2); }

std::tuple<at::Tensor, at::Tensor> causal_attention_cpu(const at::Tensor& q, const at::Tensor& k,
                                                        const at::Tensor& v) {
  if (!have_own_kernel(q)) {
    auto [out, log_sum_exp] =
        at::_scaled_dot_product_flash_attention_for_cpu(heads_first(q), heads_first(k), heads_first(v),
                                                        /*dropout_p=*/0.0, /*is_causal=*/true);
    return {heads_first(out), log_sum_exp};
  }
  at::Tensor out = at::empty(q.sizes(), q.options());
  at::Tensor log_sum_exp = at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(at::kFloat));
  const at::Tensor queries = q.contiguous(), keys = k.contiguous(), values = v.contiguous();
  dispatch_own(q, [&]<class T>(T*) { forward_heads<T>(out, log_sum_exp, queries, keys, values); });
  return {out, log_sum_exp};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> causal_attention_backward_cpu(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& log_sum_exp) {
  if (!have_own_kernel(q)) {
    auto [grad_q, grad_k, grad_v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        heads_first(grad), heads_first(q), heads_first(k), heads_first(v), heads_first(out), log_sum_exp,
        /*dropout_p=*/0.0,
        /*is_causal=*/true);
    return {heads_first(grad_q), heads_first(grad_k), heads_first(grad_v)};
  }
  Gradients grads{at::empty(q.sizes(), q.options()), at::empty(k.sizes(), k.options()),
                  at::empty(v.sizes(), v.options())};
  dispatch_own(q, [&]<class T>(T*) {
    backward_heads<T>(grads, grad.contiguous(), q.contiguous(), k.contiguous(), v.contiguous(),
                      out.contiguous(), log_sum_exp.contiguous());
  });
  return {grads.q, grads.k, grads.v};
}

TORCH_LIBRARY_IMPL(titan, CPU, m) {
  m.impl("causal_attention", causal_attention_cpu);
  m.impl("causal_attention_backward", causal_attention_backward_cpu);
}

}  // namespace
}  // namespace titan::ops

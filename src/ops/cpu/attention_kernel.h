#pragma once

// Attention on a CPU: sizes, and how the kernels find a head in memory.
//
// [Note: flash attention] (Dao, "FlashAttention-2", 2023.) Scores exist for one block of queries and one of
// keys at a time. The forward keeps a running maximum and sum for each query and rescales what it has when
// the maximum grows; it leaves log(sum(exp(score))), from which the backward makes the probabilities anew.
// With delta_i = dO_i . O_i:
//   P = exp(Q K^T - lse)   dV = P^T dO   dP = dO V^T   dS = P (dP - delta)   dQ = dS K   dK = dS^T Q
// The scale 1/sqrt(D) is taken into Q. All five products run on packed panels ([Note: panels]). LibTorch's
// kernel calls a BLAS for each small block, which costs more than the products themselves for heads of 16 to
// 64 features.
//
// The running maximum and sum may come from other keys: a forward that starts from an earlier result and its
// lse goes on where that one ended. And a backward over some of the keys takes the lse and O of all of them.
// That is how a sequence is attended part by part (parallel/context).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ops/cpu/small_products.h"

namespace titan::ops::cpu {

inline constexpr int64_t kQueries =
    48;  // of a block: a multiple of kTileRows and kPanel, so that it is whole tiles either way up
inline constexpr int64_t kKeysForward = 96;
inline constexpr int64_t kKeysBackward = 48;  // its two blocks of scores share the first-level cache

struct AttentionShape {
  int64_t batch, queries, keys, heads, kv_heads, size;
  int64_t first_query;  // query i sees the keys 0 .. first_query + i

  AttentionShape(const at::Tensor& q, const at::Tensor& k, int64_t first_query)
      : batch(q.size(0)),
        queries(q.size(1)),
        keys(k.size(1)),
        heads(q.size(2)),
        kv_heads(k.size(2)),
        size(q.size(3)),
        first_query(first_query) {}

  int64_t group() const { return heads / kv_heads; }
  // Whole blocks of either direction.
  int64_t padded_queries() const { return simd::round_up(queries, kKeysForward); }
  int64_t padded_keys() const { return simd::round_up(keys, kKeysForward); }
  int64_t padded_size() const { return simd::round_up(size, simd::kPanel); }
  int64_t size_panels() const { return padded_size() / simd::kPanel; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(size)); }
  size_t packed_queries() const { return static_cast<size_t>(padded_queries() * padded_size()); }
  size_t packed_keys() const { return static_cast<size_t>(padded_keys() * padded_size()); }
  /// How many keys of a block from `key` on, `width` long, query i sees.
  TITAN_INLINE int64_t seen(int64_t i, int64_t key, int64_t width) const {
    return std::clamp<int64_t>(first_query + i + 1 - key, 0, width);
  }
  /// Keys that the queries before `end` see.
  int64_t keys_before(int64_t end) const { return std::min(keys, first_query + end); }
  /// The first query that sees `key`, at the start of its block.
  int64_t first_block_that_sees(int64_t key) const {
    return std::max<int64_t>(0, key - first_query) / kQueries * kQueries;
  }
};

/// x [B, S, heads, size] in memory; the features of a head are adjacent, all else lies as it may.
template <class T>
struct Heads {
  T* data;
  int64_t batch_stride, row_stride, head_stride;

  /// Takes T as const or not.
  explicit Heads(const at::Tensor& x)
      : data(pointer(x)), batch_stride(x.stride(0)), row_stride(x.stride(1)), head_stride(x.stride(2)) {}
  T* at(int64_t b, int64_t head, int64_t row = 0) const {
    return data + b * batch_stride + head * head_stride + row * row_stride;
  }
  simd::Rows<std::remove_const_t<T>> rows(int64_t b, int64_t head, int64_t first, int64_t count,
                                          int64_t size) const {
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

/// log(sum(exp(score))) [B, H, S] in memory.
struct LogSums {
  float* data;
  int64_t batch_stride, head_stride, row_stride;

  explicit LogSums(const at::Tensor& x)
      : data(x.mutable_data_ptr<float>()),
        batch_stride(x.stride(0)),
        head_stride(x.stride(1)),
        row_stride(x.stride(2)) {}
  float* at(int64_t b, int64_t head) const { return data + b * batch_stride + head * head_stride; }
};

/// Where the forward starts from.
enum class AttentionStart {
  Nothing,  ///< `out` and `log_sum_exp` are only written
  Partial,  ///< they hold a result over other keys (log_sum_exp -inf: over none); Out is float
};

/// out = softmax(q k^T / sqrt(size)) v, over what `start` says and the keys that `shape` lets each query see.
/// T: float or BFloat16; Out: T or float. Features adjacent in all tensors.
template <class T, class Out>
void attention_forward(const at::Tensor& out, const at::Tensor& log_sum_exp, const at::Tensor& q,
                       const at::Tensor& k, const at::Tensor& v, int64_t first_query, AttentionStart start);

struct AttentionGradTensors {
  at::Tensor q, k, v;
};

/// The gradients of q, k and v: written (Out = T), or, with `add`, added (Out = float).
template <class T, class Out>
void attention_backward(const AttentionGradTensors& grads, const at::Tensor& grad, const at::Tensor& q,
                        const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                        const at::Tensor& log_sum_exp, int64_t first_query, bool add);

}  // namespace titan::ops::cpu

#pragma once

// Attention on a CPU: products of small fp32 matrices that fit into a cache, and how the kernels find a head
// in memory.

#include <algorithm>
#include <type_traits>

#include "ops/cpu/simd.h"
#include "titan/ops/functional.h"

namespace titan::ops::simd {

// [Note: panels] The right factor B [K, N] is packed in panels of 16 columns, [N/16][K][16] with zeros after
// column N, so that a product reads it front to back. The left one is read element by element with any
// strides: its transpose needs no packing.

inline constexpr int64_t kPanel = 16;
inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// A left factor: element (i, k) is data[i * row_stride + k * step].
struct LeftFactor {
  const float* data;
  int64_t row_stride;
  int64_t step;
};
/// A right factor: `count` panels, `stride` floats apart.
struct Panels {
  const float* data;
  int64_t stride;
  int64_t count;
};
/// A product's result: rows `stride` floats apart.
struct Target {
  float* data;
  int64_t stride;
};

// A tile's sums fill the registers except for those that hold a row of B and an element of A: 12 of AVX2's
// 16, 24 of AVX-512's 32. The more panels a tile spans, the more often an element of A is used per load.
template <class V>
inline constexpr int64_t kTileSums = sizeof(V) == sizeof(WideFloats) ? 24 : 12;
template <class V>
inline constexpr int64_t kTilePanels = sizeof(V) == sizeof(WideFloats) ? 4 : 1;
inline constexpr int64_t kTileRows = 24;  // the rows of a product are a multiple of this

/// c [rows of a tile, 16 * panels] = (add ? c : 0) + a [rows of a tile, depth] * b [depth, 16 * panels]
template <class V, int64_t panels, bool add>
TITAN_INLINE void multiply_tile(Target c, LeftFactor a, Panels b, int64_t depth) {
  constexpr int64_t lanes = kFloatsOf<V>, per_panel = kPanel / lanes, width = panels * per_panel;
  V sums[kTileSums<V>], right[width];
#pragma GCC unroll 24
  for (int64_t s = 0; s < kTileSums<V>; ++s)
    sums[s] = add ? load_vector<V>(c.data + s / width * c.stride + s % width * lanes) : V{};
  for (int64_t k = 0; k < depth; ++k) {
#pragma GCC unroll 4
    for (int64_t w = 0; w < width; ++w)
      right[w] = load_vector<V>(b.data + w / per_panel * b.stride + k * kPanel + w % per_panel * lanes);
#pragma GCC unroll 24
    for (int64_t s = 0; s < kTileSums<V>; ++s)
      sums[s] += a.data[s / width * a.row_stride + k * a.step] * right[s % width];
  }
#pragma GCC unroll 24
  for (int64_t s = 0; s < kTileSums<V>; ++s)
    store(c.data + s / width * c.stride + s % width * lanes, sums[s]);
}

template <class V, int64_t panels, bool add>
TITAN_INLINE void multiply_columns(Target c, LeftFactor a, Panels b, int64_t rows, int64_t depth) {
  constexpr int64_t tile_rows = kTileSums<V> * kFloatsOf<V> / (panels * kPanel);
  for (int64_t i = 0; i < rows; i += tile_rows)
    multiply_tile<V, panels, add>({c.data + i * c.stride, c.stride},
                                  {a.data + i * a.row_stride, a.row_stride, a.step}, b, depth);
}

/// c [rows, 16 * panels] = (add ? c : 0) + a [rows, depth] * b; rows: a multiple of kTileRows.
template <class V, bool add>
TITAN_INLINE void multiply_panels(Target c, LeftFactor a, Panels b, int64_t rows, int64_t depth) {
  constexpr int64_t most = kTilePanels<V>;
  for (; b.count >= most; b.count -= most, c.data += most * kPanel, b.data += most * b.stride)
    multiply_columns<V, most, add>(c, a, b, rows, depth);
  if constexpr (most > 1) {
    if (b.count == 3) multiply_columns<V, 3, add>(c, a, b, rows, depth);
    if (b.count == 2) multiply_columns<V, 2, add>(c, a, b, rows, depth);
    if (b.count == 1) multiply_columns<V, 1, add>(c, a, b, rows, depth);
  }
}

/// A matrix of T (const or not) in memory: `size` elements a row, rows `stride` apart.
template <class T>
struct Rows {
  T* data;
  int64_t stride;
  int64_t count;
  int64_t size;
};

/// Blocks of `block` rows, each as its transpose: [padded_rows/block][size][block] = scale * from, zeros
/// after the last row. A left factor of such a block has adjacent rows, so that its tiles' addresses are
/// constants.
template <int64_t block, class T>
TITAN_INLINE void pack_blocks(float* to, Rows<const T> from, int64_t padded_rows, float scale) {
  for (int64_t first = 0; first < padded_rows; first += block)
    for (int64_t i = 0; i < from.size; ++i)
      for (int64_t row = first; row < first + block; ++row)
        *to++ = row < from.count ? scale * static_cast<float>(from.data[row * from.stride + i]) : 0.0f;
}

/// Panels of `from` itself: [size/16][padded_rows][16].
template <class T>
TITAN_INLINE void pack_panels(float* to, Rows<const T> from, int64_t padded_rows, float scale) {
  for (int64_t first = 0; first < from.size; first += kPanel)
    for (int64_t row = 0; row < padded_rows; ++row)
      for (int64_t i = first; i < first + kPanel; ++i)
        *to++ = row < from.count && i < from.size
                    ? scale * static_cast<float>(from.data[row * from.stride + i])
                    : 0.0f;
}

/// Panels of its transpose: [padded_rows/16][size][16].
template <class T>
TITAN_INLINE void pack_transposed_panels(float* to, Rows<const T> from, int64_t padded_rows) {
  pack_blocks<kPanel>(to, from, padded_rows, 1.0f);
}

/// to = scale * the first to.size columns of `from` [to.count, from_stride].
template <class T>
TITAN_INLINE void unpack_rows(Rows<T> to, const float* from, int64_t from_stride, float scale) {
  for (int64_t row = 0; row < to.count; ++row)
    for (int64_t i = 0; i < to.size; i += kWidth<T>)
      store_up_to(to.data + row * to.stride + i, load(from + row * from_stride + i) * scale, to.size - i);
}

}  // namespace titan::ops::simd

namespace titan::ops::cpu {

// [Note: flash attention] (Dao, "FlashAttention-2", 2023.) Scores exist for one block of queries and one of
// keys at a time. The forward keeps a running maximum and sum for each query and rescales its result when the
// maximum grows; it returns log(sum(exp(score))), from which the backward recomputes the probabilities. With
// delta_i = dO_i . O_i:
//   P = exp(Q K^T - lse)   dV = P^T dO   dP = dO V^T   dS = P (dP - delta)   dQ = dS K   dK = dS^T Q
// The scale 1/sqrt(D) is applied to Q. All five products run on packed panels ([Note: panels]). LibTorch's
// kernel calls a BLAS for each small block, which costs more than the products themselves for heads of 16 to
// 64 features.
//
// The running maximum and sum may come from other keys: a forward that starts from an earlier result and its
// lse continues it. And a backward over some of the keys takes the lse and O of all of them. That is how a
// sequence is attended part by part (parallel/context).

/// Queries in a block: a multiple of kTileRows and kPanel, so that it is whole tiles in either orientation.
inline constexpr int64_t kQueries = 48;
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
  /// How many of the `width` keys from `key` on query i sees.
  TITAN_INLINE int64_t seen(int64_t i, int64_t key, int64_t width) const {
    return std::clamp<int64_t>(first_query + i + 1 - key, 0, width);
  }
  /// Keys that the queries before `end` see.
  int64_t keys_before(int64_t end) const { return std::min(keys, first_query + end); }
  /// The first query that sees `key`, rounded down to the start of its block.
  int64_t first_block_that_sees(int64_t key) const {
    return std::max<int64_t>(0, key - first_query) / kQueries * kQueries;
  }
};

/// x [B, S, heads, size] in memory; the features of a head are adjacent, other strides are free. T: const or
/// not.
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
/// The same [B, H, S] of all heads.
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

/// Where the forward starts from.
enum class AttentionStart {
  Nothing,  ///< the sum is only written
  Partial,  ///< it holds a result over other keys (log_sum_exp -inf: over none); Out is float
};

/// sum = softmax(q k^T / sqrt(size)) v over what `start` says and the keys that each query sees. T: float or
/// BFloat16; Out: T or float. Features adjacent in all tensors.
template <class T, class Out>
void attention_forward(const AttentionSum& sum, const QueriesKeysValues& in, int64_t first_query,
                       AttentionStart start);

/// The forward's results over all keys and the gradient of `out`.
struct AttentionOutputs {
  at::Tensor grad, out, log_sum_exp;
};

/// The gradients of q, k and v: written (Out = T) or, with `add`, added to (Out = float).
template <class T, class Out>
void attention_backward(const QueriesKeysValues& grads, const QueriesKeysValues& in,
                        const AttentionOutputs& results, int64_t first_query, bool add);

}  // namespace titan::ops::cpu

#pragma once

// Products of small fp32 matrices that lie in cache: attention's.
//
// [Note: panels] The right factor B [K, N] is packed in panels of 16 columns, [N/16][K][16] with zeros behind
// N, so that a product reads it front to back. The left one is read element by element, with any strides: its
// transpose needs no packing.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ops/cpu/simd.h"

namespace titan::ops::simd {

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

// A tile's sums fill the registers but for those that hold a row of B and an element of A: 12 of AVX2's 16,
// 24 of AVX-512's 32. The more panels a tile spans, the more often an element of A is used once it is loaded.
template <class V>
inline constexpr int64_t kTileSums = sizeof(V) == sizeof(WideFloats) ? 24 : 12;
template <class V>
inline constexpr int64_t kTilePanels = sizeof(V) == sizeof(WideFloats) ? 4 : 1;
inline constexpr int64_t kTileRows = 24;  // the rows of a product are a multiple of this

/// c [rows of a tile, 16 * panels] = (add ? c : 0) + a [rows of a tile, depth] * panels [depth, 16 * panels]
template <class V, int64_t panels, bool add>
TITAN_INLINE void multiply_tile(float* c, int64_t c_stride, LeftFactor a, const float* b,
                                int64_t panel_stride, int64_t depth) {
  constexpr int64_t lanes = kFloatsOf<V>, per_panel = kPanel / lanes, width = panels * per_panel;
  V sums[kTileSums<V>], right[width];
#pragma GCC unroll 24
  for (int64_t s = 0; s < kTileSums<V>; ++s)
    sums[s] = add ? load_vector<V>(c + s / width * c_stride + s % width * lanes) : V{};
  for (int64_t k = 0; k < depth; ++k) {
#pragma GCC unroll 4
    for (int64_t w = 0; w < width; ++w)
      right[w] = load_vector<V>(b + w / per_panel * panel_stride + k * kPanel + w % per_panel * lanes);
#pragma GCC unroll 24
    for (int64_t s = 0; s < kTileSums<V>; ++s)
      sums[s] += a.data[s / width * a.row_stride + k * a.step] * right[s % width];
  }
#pragma GCC unroll 24
  for (int64_t s = 0; s < kTileSums<V>; ++s) store(c + s / width * c_stride + s % width * lanes, sums[s]);
}

template <class V, int64_t panels, bool add>
TITAN_INLINE void multiply_columns(float* c, int64_t c_stride, LeftFactor a, const float* b,
                                   int64_t panel_stride, int64_t rows, int64_t depth) {
  constexpr int64_t tile_rows = kTileSums<V> * kFloatsOf<V> / (panels * kPanel);
  for (int64_t i = 0; i < rows; i += tile_rows)
    multiply_tile<V, panels, add>(c + i * c_stride, c_stride,
                                  {a.data + i * a.row_stride, a.row_stride, a.step}, b, panel_stride, depth);
}

/// c [rows, 16 * panels] = (add ? c : 0) + a [rows, depth] * b; rows a multiple of kTileRows; b's panels
/// start `panel_stride` floats apart.
template <class V, bool add>
TITAN_INLINE void multiply_panels(float* c, int64_t c_stride, LeftFactor a, const float* b,
                                  int64_t panel_stride, int64_t rows, int64_t depth, int64_t panels) {
  constexpr int64_t most = kTilePanels<V>;
  for (; panels >= most; panels -= most, c += most * kPanel, b += most * panel_stride)
    multiply_columns<V, most, add>(c, c_stride, a, b, panel_stride, rows, depth);
  if constexpr (most > 1) {
    if (panels == 3) multiply_columns<V, 3, add>(c, c_stride, a, b, panel_stride, rows, depth);
    if (panels == 2) multiply_columns<V, 2, add>(c, c_stride, a, b, panel_stride, rows, depth);
    if (panels == 1) multiply_columns<V, 1, add>(c, c_stride, a, b, panel_stride, rows, depth);
  }
}

/// A matrix of T in memory: `size` elements a row, rows `stride` apart.
template <class T>
struct Rows {
  const T* data;
  int64_t stride;
  int64_t count;
  int64_t size;
};

/// Blocks of `block` rows, each as its transpose: [padded_rows/block][size][block] = scale * from, zeros
/// behind the last row. A left factor of such a block has adjacent rows, so that its tiles' addresses are
/// constants.
template <int64_t block, class T>
TITAN_INLINE void pack_blocks(float* to, Rows<T> from, int64_t padded_rows, float scale) {
  for (int64_t first = 0; first < padded_rows; first += block)
    for (int64_t i = 0; i < from.size; ++i)
      for (int64_t row = first; row < first + block; ++row)
        *to++ = row < from.count ? scale * static_cast<float>(from.data[row * from.stride + i]) : 0.0f;
}

/// Panels of `from` itself: [size/16][padded_rows][16].
template <class T>
TITAN_INLINE void pack_panels(float* to, Rows<T> from, int64_t padded_rows, float scale) {
  for (int64_t first = 0; first < from.size; first += kPanel)
    for (int64_t row = 0; row < padded_rows; ++row)
      for (int64_t i = first; i < first + kPanel; ++i)
        *to++ = row < from.count && i < from.size
                    ? scale * static_cast<float>(from.data[row * from.stride + i])
                    : 0.0f;
}

/// Panels of its transpose: [padded_rows/16][size][16].
template <class T>
TITAN_INLINE void pack_transposed_panels(float* to, Rows<T> from, int64_t padded_rows) {
  pack_blocks<kPanel>(to, from, padded_rows, 1.0f);
}

/// The first from.size columns of `from` [rows, from_stride], each times `scale`, in rows of T `stride`
/// apart.
template <class T>
TITAN_INLINE void unpack_rows(T* to, int64_t stride, const float* from, int64_t from_stride, int64_t rows,
                              int64_t size, float scale) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < size; i += kWidth<T>)
      store_up_to(to + row * stride + i, load(from + row * from_stride + i) * scale, size - i);
}

}  // namespace titan::ops::simd

namespace titan::ops::cpu {

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

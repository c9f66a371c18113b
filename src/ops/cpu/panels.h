#pragma once

// Products of small fp32 matrices that fit into a cache, for the blocks of CPU attention.

#include "ops/cpu/simd.h"

namespace titan::ops::simd {

// [Note: panels] The right factor B [K, N] is packed in panels of 16 columns, [N/16][K][16] with zeros after
// column N, so that a product reads it sequentially. The left factor is read element by element with any
// strides, so its transpose needs no packing.

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

// A tile's sums fill the registers, except for those that hold a row of B and an element of A: 12 of AVX2's
// 16 registers, 24 of AVX-512's 32. With more panels in a tile, each loaded element of A is used more often.
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

/// c [rows, 16 * panels] = (add ? c : 0) + a [rows, depth] * b. `rows` is a multiple of kTileRows.
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

/// A matrix of T (which may be const) in memory: `size` elements per row, rows `stride` apart.
template <class T>
struct Rows {
  T* data;
  int64_t stride;
  int64_t count;
  int64_t size;
};

/// Packs blocks of `block` rows, each transposed: [padded_rows/block][size][block] = scale * from, with zeros
/// after the last row. A left factor of such a block has adjacent rows, so that its tiles' addresses are
/// constants.
template <int64_t block, class T>
TITAN_INLINE void pack_blocks(float* to, Rows<const T> from, int64_t padded_rows, float scale) {
  for (int64_t first = 0; first < padded_rows; first += block)
    for (int64_t i = 0; i < from.size; ++i)
      for (int64_t row = first; row < first + block; ++row)
        *to++ = row < from.count ? scale * static_cast<float>(from.data[row * from.stride + i]) : 0.0f;
}

/// Packs panels of `from` itself: [size/16][padded_rows][16].
template <class T>
TITAN_INLINE void pack_panels(float* to, Rows<const T> from, int64_t padded_rows, float scale) {
  for (int64_t first = 0; first < from.size; first += kPanel)
    for (int64_t row = 0; row < padded_rows; ++row)
      for (int64_t i = first; i < first + kPanel; ++i)
        *to++ = row < from.count && i < from.size
                    ? scale * static_cast<float>(from.data[row * from.stride + i])
                    : 0.0f;
}

/// Packs panels of the transpose of `from`: [padded_rows/16][size][16].
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

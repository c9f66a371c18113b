#pragma once

// Products of small fp32 matrices that lie in cache: attention's.
//
// [Note: panels] The right factor B [K, N] is packed in panels of 16 columns, [N/16][K][16] with zeros behind
// N, so that a product reads it front to back. The left one is read element by element, with any strides: its
// transpose needs no packing.

#include <cstdint>

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

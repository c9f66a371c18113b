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
inline constexpr int64_t kTileRows = 6;  // 6 x 16 sums fill 12 of AVX2's 16 registers

inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// A left factor: element (i, k) is data[i * row_stride + k * step].
struct LeftFactor {
  const float* data;
  int64_t row_stride;
  int64_t step;
};

/// c [6, 16] = (add ? c : 0) + a [6, depth] * panel [depth, 16]
template <bool add>
TITAN_INLINE void multiply_tile(float* c, int64_t c_stride, LeftFactor a, const float* panel, int64_t depth) {
  Floats left[kTileRows], right[kTileRows];
#pragma GCC unroll 6
  for (int64_t i = 0; i < kTileRows; ++i) {
    left[i] = add ? load(c + i * c_stride) : Floats{};
    right[i] = add ? load(c + i * c_stride + 8) : Floats{};
  }
  for (int64_t k = 0; k < depth; ++k, panel += kPanel) {
    const Floats b0 = load(panel), b1 = load(panel + 8);
#pragma GCC unroll 6
    for (int64_t i = 0; i < kTileRows; ++i) {
      const float value = a.data[i * a.row_stride + k * a.step];
      left[i] += value * b0;
      right[i] += value * b1;
    }
  }
#pragma GCC unroll 6
  for (int64_t i = 0; i < kTileRows; ++i) {
    store(c + i * c_stride, left[i]);
    store(c + i * c_stride + 8, right[i]);
  }
}

/// c [rows, 16 * panels] = (add ? c : 0) + a [rows, depth] * b; rows a multiple of 6; b's panels start
/// `panel_stride` floats apart.
template <bool add>
TITAN_INLINE void multiply_panels(float* c, int64_t c_stride, LeftFactor a, const float* b,
                                  int64_t panel_stride, int64_t rows, int64_t depth, int64_t panels) {
  for (int64_t p = 0; p < panels; ++p)
    for (int64_t i = 0; i < rows; i += kTileRows)
      multiply_tile<add>(c + i * c_stride + p * kPanel, c_stride,
                         {a.data + i * a.row_stride, a.row_stride, a.step}, b + p * panel_stride, depth);
}

/// A matrix of T in memory: `size` elements a row, rows `stride` apart.
template <class T>
struct Rows {
  const T* data;
  int64_t stride;
  int64_t count;
  int64_t size;
};

/// to [padded_rows, size] = scale * from, zeros behind the last row.
template <class T>
TITAN_INLINE void pack_rows(float* to, Rows<T> from, int64_t padded_rows, float scale) {
  for (int64_t row = 0; row < padded_rows; ++row)
    for (int64_t i = 0; i < from.size; ++i)
      to[row * from.size + i] =
          row < from.count ? scale * static_cast<float>(from.data[row * from.stride + i]) : 0.0f;
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
  for (int64_t first = 0; first < padded_rows; first += kPanel)
    for (int64_t i = 0; i < from.size; ++i)
      for (int64_t row = first; row < first + kPanel; ++row)
        *to++ = row < from.count ? static_cast<float>(from.data[row * from.stride + i]) : 0.0f;
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

// titan::float8_cast_blocks on a CPU: one pass, as a block fits into the first cache.

#include <algorithm>

#include <torch/library.h>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include "float8/block_composite.h"
#include "float8/block_scale.h"
#include "float8/cpu/tiles.h"

namespace titan::float8 {

namespace {

using cpu::E4m3;
using cpu::E5m2;
using cpu::kTile;
namespace simd = ops::simd;

constexpr int64_t kLanes = cpu::kFloatLanes;

template <class Format>
constexpr at::ScalarType dtype_of() {
  return std::is_same_v<Format, E4m3> ? at::kFloat8_e4m3fn : at::kFloat8_e5m2;
}

// [Note: magnitudes as integers] in amax.cpp.
TITAN_INLINE simd::Ints magnitude_bits(simd::Floats x) {
  return reinterpret_cast<simd::Ints>(x) & 0x7fffffff;
}
TITAN_INLINE simd::Ints larger_bits(simd::Ints a, simd::Ints b) { return a > b ? a : b; }

template <class Format>
TITAN_INLINE float write_exponent(uint8_t* scale, uint32_t magnitude, bool round_up) {
  const int exponent = exponent_of(magnitude, dtype_of<Format>(), round_up);
  *scale = static_cast<uint8_t>(exponent);
  return factor_of(exponent, round_up);
}

// `count` <= 32 elements; the rest of the 32 bytes becomes zero.
template <class Format, class T>
TITAN_INLINE void cast_block(uint8_t* out, uint8_t* scale, const T* x, bool round_up, int64_t count) {
  constexpr int64_t kVectors = kBlock / kLanes;
  simd::Floats values[kVectors];
  simd::Ints largest{};
  for (int64_t i = 0; i < kVectors; ++i) {
    const int64_t first = i * kLanes;
    values[i] = first + kLanes <= count ? simd::load(x + first)
                : first < count         ? simd::load_up_to(x + first, count - first)
                                        : simd::Floats{};
    largest = larger_bits(largest, magnitude_bits(values[i]));
  }
  int32_t magnitude = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) magnitude = std::max<int32_t>(magnitude, largest[lane]);
  const float factor = write_exponent<Format>(scale, static_cast<uint32_t>(magnitude), round_up);
  for (int64_t i = 0; i < kVectors; ++i)
    cpu::store_bytes(out + i * kLanes, cpu::to_float8<Format>(values[i] * factor));
}

template <class Format, class T>
TITAN_CPU_CLONES void cast_row_in_blocks(uint8_t* out, uint8_t* scales, const T* x, bool round_up,
                                         int64_t columns) {
  for (int64_t first = 0; first < columns; first += kBlock)
    cast_block<Format>(out + first, scales + first / kBlock, x + first, round_up,
                       std::min(kBlock, columns - first));
}

struct BlockMatrix {
  int64_t rows, columns;
  int64_t blocks;  ///< of the summed dimension
};

// Of `rows` <= 32 rows and `count` <= kTile columns: each column's factor; its exponent goes `stride` behind
// the last one's.
template <class Format, class T>
TITAN_INLINE void column_factors(float* factors, uint8_t* scales, int64_t stride, const T* x, int64_t columns,
                                 int64_t rows, int64_t count, bool round_up) {
  simd::Ints largest[kTile / kLanes] = {};
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < count; i += kLanes)
      largest[i / kLanes] =
          larger_bits(largest[i / kLanes],
                      magnitude_bits(simd::load_up_to(x + row * columns + i, std::min(kLanes, count - i))));
  for (int64_t column = 0; column < count; ++column)
    factors[column] = write_exponent<Format>(
        scales + column * stride, static_cast<uint32_t>(largest[column / kLanes][column % kLanes]), round_up);
}

// Columns [first, first + count) of x become rows of `out` [columns, blocks * 32].
template <class Format, class T>
TITAN_CPU_CLONES void cast_columns_in_blocks(uint8_t* out, uint8_t* scales, const T* x, BlockMatrix size,
                                             bool round_up, int64_t first, int64_t count) {
  alignas(64) uint8_t tile[kTile * kTile];
  alignas(64) uint8_t turned[kTile * kTile];
  float factors[kTile] = {};
  const int64_t padded = size.blocks * kBlock;
  for (int64_t top = 0; top < padded; top += kTile) {
    const int64_t height = std::min(kTile, padded - top);
    for (int64_t row = top; row < top + height; row += kBlock) {
      const T* from = x + row * size.columns + first;
      const int64_t rows = std::min(kBlock, size.rows - row);
      column_factors<Format>(factors, scales + first * size.blocks + row / kBlock, size.blocks, from,
                             size.columns, rows, count, round_up);
      uint8_t* to = tile + (row - top) * kTile;
      for (int64_t i = 0; i < rows; ++i)
        cpu::cast_tile_row<Format>(to + i * kTile, from + i * size.columns, factors, 1, count);
      std::memset(to + rows * kTile, 0, static_cast<size_t>((kBlock - rows) * kTile));
    }
    cpu::turn_tile(turned, tile);
    for (int64_t column = 0; column < count; ++column)
      std::memcpy(out + (first + column) * padded + top, turned + column * kTile,
                  static_cast<size_t>(height));
  }
}

template <class Format, class T>
void cast_matrix_in_blocks(uint8_t* out, uint8_t* scales, const T* x, BlockMatrix size, bool round_up,
                           bool transposed) {
  if (!transposed) {
    const int64_t grain = std::max<int64_t>(1, 16384 / size.columns);
    return at::parallel_for(0, size.rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        cast_row_in_blocks<Format>(out + row * size.blocks * kBlock, scales + row * size.blocks,
                                   x + row * size.columns, round_up, size.columns);
    });
  }
  const int64_t tiles = (size.columns + kTile - 1) / kTile;
  at::parallel_for(0, tiles, std::max<int64_t>(1, 512 / size.rows), [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile)
      cast_columns_in_blocks<Format>(out, scales, x, size, round_up, tile * kTile,
                                     std::min(kTile, size.columns - tile * kTile));
  });
}

std::tuple<at::Tensor, at::Tensor> cast_blocks_cpu(const at::Tensor& x, at::ScalarType dtype, bool round_up,
                                                   bool transposed) {
  const bool known = x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16;
  if (!known || !x.is_contiguous()) return composite::cast_blocks(x, dtype, round_up, transposed);
  const int64_t elements = x.size(transposed ? 0 : 1), vectors = x.size(transposed ? 1 : 0);
  const BlockMatrix size{x.size(0), x.size(1), (elements + kBlock - 1) / kBlock};
  at::Tensor data = at::empty({vectors, size.blocks * kBlock}, x.options().dtype(dtype));
  at::Tensor scale = at::empty({vectors, size.blocks}, x.options().dtype(at::kFloat8_e8m0fnu));
  const auto run = [&]<class T>(const T* from) {
    auto* to = static_cast<uint8_t*>(data.mutable_data_ptr());
    auto* exponents = static_cast<uint8_t*>(scale.mutable_data_ptr());
    const auto cast =
        dtype == at::kFloat8_e4m3fn ? cast_matrix_in_blocks<E4m3, T> : cast_matrix_in_blocks<E5m2, T>;
    cast(to, exponents, from, size, round_up, transposed);
  };
  if (x.scalar_type() == at::kFloat) {
    run(x.const_data_ptr<float>());
  } else {
    run(x.const_data_ptr<c10::BFloat16>());
  }
  return {data, scale};
}

TORCH_LIBRARY_IMPL(titan, CPU, m) { m.impl("float8_cast_blocks", cast_blocks_cpu); }

}  // namespace
}  // namespace titan::float8

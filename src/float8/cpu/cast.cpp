// From fp32 to 8 bits, eight at a time, as c10 converts one.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "float8/block_scale.h"
#include "float8/cast.h"
#include "ops/cpu/dtype.h"
#include "ops/cpu/simd.h"

namespace titan::float8::cpu {

namespace simd = ops::simd;
using simd::Floats;
using simd::Ints;
using simd::Words;
using Bytes8 = uint8_t __attribute__((vector_size(8)));

/// The bits of a format; a number below `smallest_normal` keeps its last bits by an addition that shifts them
/// out of fp32.
struct E4m3 {
  static constexpr uint32_t largest = 0x43e00000;          // 448
  static constexpr uint32_t smallest_normal = 121u << 23;  // 2^-6
  static constexpr uint32_t shift_down = 141u << 23;
  static constexpr int mantissa_shift = 20;
  static constexpr uint32_t rebias = (static_cast<uint32_t>(7 - 127) << 23) + 0x7ffff;
};
struct E5m2 {
  static constexpr uint32_t largest = 0x47600000;          // 57344
  static constexpr uint32_t smallest_normal = 113u << 23;  // 2^-14
  static constexpr uint32_t shift_down = 134u << 23;
  static constexpr int mantissa_shift = 21;
  static constexpr uint32_t rebias = (static_cast<uint32_t>(15 - 127) << 23) + 0xfffff;
};

TITAN_INLINE Words select(Ints mask, Words yes, Words no) {
  const Words bits = reinterpret_cast<Words>(mask);
  return (bits & yes) | (~bits & no);
}

/// Nearest, ties to even, held within the format's range; NaN stays NaN and keeps its sign. One byte per
/// lane.
template <class Format>
TITAN_INLINE Words to_float8(Floats x) {
  const Words bits = reinterpret_cast<Words>(x), sign = bits & 0x80000000u;
  const Words magnitude = bits ^ sign;
  // As signed numbers, which AVX2 compares: magnitudes have no sign bit.
  const Ints is_nan = reinterpret_cast<Ints>(magnitude) > 0x7f800000;
  const Ints above = reinterpret_cast<Ints>(magnitude) > static_cast<int32_t>(Format::largest);
  const Words held = select(above, Words{} + Format::largest, magnitude);
  const Ints is_small = reinterpret_cast<Ints>(held) < static_cast<int32_t>(Format::smallest_normal);
  const Words shift = Words{} + Format::shift_down;
  const Words small =
      reinterpret_cast<Words>(reinterpret_cast<Floats>(held) + reinterpret_cast<Floats>(shift)) - shift;
  const Words normal =
      (held + Format::rebias + ((held >> Format::mantissa_shift) & 1)) >> Format::mantissa_shift;
  const Words value = select(is_small, small, normal);
  return select(is_nan, Words{} + 0x7f, value) | (sign >> 24);
}

TITAN_INLINE void store_bytes(uint8_t* to, Words lanes) {
  const Bytes8 bytes = __builtin_convertvector(lanes, Bytes8);
  std::memcpy(to, &bytes, sizeof bytes);
}

// Casting and turning at once: tiles of 64 by 64 elements are cast row by row, turned eight bytes by eight,
// and written in whole lines of the cache: the result's rows often lie a power of two apart, so that few of
// them fit into it at once.

inline constexpr int64_t kTile = 64;
inline constexpr int64_t kFloatLanes = simd::kWidth<float>;
using Blocks = uint64_t __attribute__((vector_size(32)));  // eight bytes of a row each

// In: row i of the four 8 x 8 blocks; out: column i of each (Warren, "Hacker's Delight", 7-3).
template <int kDistance, uint64_t kMask>
TITAN_INLINE void swap_halves(Blocks (&rows)[8]) {
  for (int i = 0; i < 8; ++i) {
    if (i & kDistance) continue;
    const Blocks changed = ((rows[i] >> (8 * kDistance)) ^ rows[i + kDistance]) & (Blocks{} + kMask);
    rows[i + kDistance] ^= changed;
    rows[i] ^= changed << (8 * kDistance);
  }
}
TITAN_INLINE void turn_blocks(Blocks (&rows)[8]) {
  swap_halves<4, 0x00000000ffffffff>(rows);
  swap_halves<2, 0x0000ffff0000ffff>(rows);
  swap_halves<1, 0x00ff00ff00ff00ff>(rows);
}

template <class Format, class T>
TITAN_INLINE void cast_tile_row(uint8_t* out, const T* x, const float* scales, int64_t scale_step,
                                int64_t count) {
  for (int64_t i = 0; i < kTile; i += kFloatLanes) {
    const simd::Floats scale =
        scale_step == 0 ? simd::broadcast<simd::Floats>(scales[0]) : simd::load_up_to(scales + i, count - i);
    const simd::Floats values = i < count ? simd::load_up_to(x + i, count - i) : simd::Floats{};
    store_bytes(out + i, to_float8<Format>(values * scale));
  }
}

TITAN_INLINE void turn_tile(uint8_t* turned, const uint8_t* tile) {
  for (int64_t top = 0; top < kTile; top += 8)
    for (int64_t left = 0; left < kTile; left += 32) {
      Blocks rows[8];
      for (int64_t i = 0; i < 8; ++i) std::memcpy(&rows[i], tile + (top + i) * kTile + left, sizeof(Blocks));
      turn_blocks(rows);
      for (int64_t block = 0; block < 4; ++block)
        for (int64_t i = 0; i < 8; ++i) {
          const uint64_t bytes = rows[i][block];
          std::memcpy(turned + (left + 8 * block + i) * kTile + top, &bytes, 8);
        }
    }
}

}  // namespace titan::float8::cpu

namespace titan::float8 {

namespace {

using cpu::E4m3;
using cpu::E5m2;
using cpu::kTile;
using simd_words = cpu::Words;
namespace simd = ops::simd;

constexpr int64_t kLanes = simd::kWidth<float>;

// `count` elements under one scale.
template <class Format, class T>
TITAN_CPU_CLONES void cast_run(uint8_t* out, const T* x, float scale, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    cpu::store_bytes(out + i, cpu::to_float8<Format>(simd::load(x + i) * scale));
  if (i == count) return;
  const simd_words rest = cpu::to_float8<Format>(simd::load_up_to(x + i, count - i) * scale);
  for (int64_t lane = 0; i + lane < count; ++lane) out[i + lane] = static_cast<uint8_t>(rest[lane]);
}

struct Matrix {
  int64_t rows, columns;
};

// Columns [first, first + count) of x become rows of `out` [columns, rows].
template <class Format, class T>
TITAN_CPU_CLONES void cast_turned(uint8_t* out, const T* x, const float* scales, int64_t scale_step,
                                  Matrix size, int64_t first, int64_t count) {
  alignas(64) uint8_t tile[kTile * kTile] = {};
  alignas(64) uint8_t turned[kTile * kTile];
  for (int64_t row = 0; row < size.rows; row += kTile) {
    const int64_t height = std::min(kTile, size.rows - row);
    for (int64_t i = 0; i < height; ++i)
      cpu::cast_tile_row<Format>(tile + i * kTile, x + (row + i) * size.columns + first,
                                 scales + scale_step * first, scale_step, count);
    cpu::turn_tile(turned, tile);
    for (int64_t column = 0; column < count; ++column) {
      uint8_t* to = out + (first + column) * size.rows + row;
      if (height == kTile) {
        std::memcpy(to, turned + column * kTile, kTile);
      } else {
        std::memcpy(to, turned + column * kTile, static_cast<size_t>(height));
      }
    }
  }
}

template <class Format, class T>
void cast_matrix(uint8_t* out, const T* x, const at::Tensor& scale, Matrix size, bool transposed) {
  const float* scales = scale.const_data_ptr<float>();
  const int64_t scale_step = scale.numel() > 1 ? 1 : 0;
  constexpr int64_t kRun = 32768;  // elements worth a thread
  if (!transposed && scale_step == 0)
    return at::parallel_for(0, size.rows * size.columns, kRun, [&](int64_t begin, int64_t end) {
      cast_run<Format>(out + begin, x + begin, scales[0], end - begin);
    });
  if (!transposed) {
    const int64_t grain = std::max<int64_t>(1, kRun / std::max<int64_t>(size.columns, 1));
    return at::parallel_for(0, size.rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        cast_run<Format>(out + row * size.columns, x + row * size.columns, scales[row], size.columns);
    });
  }
  const int64_t tiles = (size.columns + kTile - 1) / kTile;
  at::parallel_for(0, tiles, std::max<int64_t>(1, 1024 / std::max<int64_t>(size.rows, 1)),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t tile = begin; tile < end; ++tile)
                       cast_turned<Format>(out, x, scales, scale_step, size, tile * kTile,
                                           std::min(kTile, size.columns - tile * kTile));
                   });
}

at::Tensor cast_cpu(const at::Tensor& x, const at::Tensor& scale, at::ScalarType dtype, bool transposed) {
  const bool known = x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16;
  if (!known || !x.is_contiguous()) return composite::cast(x, scale, dtype, transposed);
  const Matrix size{x.size(0), x.size(1)};
  const at::Tensor scales = scale.contiguous();
  at::Tensor out = transposed ? at::empty({size.columns, size.rows}, x.options().dtype(dtype))
                              : at::empty(x.sizes(), x.options().dtype(dtype));
  auto* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  const auto run = [&]<class T>(const T* from) {
    if (dtype == at::kFloat8_e4m3fn) {
      cast_matrix<E4m3>(to, from, scales, size, transposed);
    } else {
      cast_matrix<E5m2>(to, from, scales, size, transposed);
    }
  };
  if (x.scalar_type() == at::kFloat) {
    run(x.const_data_ptr<float>());
  } else {
    run(x.const_data_ptr<c10::BFloat16>());
  }
  return out;
}

TORCH_LIBRARY_IMPL(titan, CPU, m) { m.impl("float8_cast", cast_cpu); }

}  // namespace

// titan::float8_cast_blocks on a CPU: one pass, as a block fits into the first cache.

namespace {

using cpu::E4m3;
using cpu::E5m2;
using cpu::kTile;
namespace simd = ops::simd;

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

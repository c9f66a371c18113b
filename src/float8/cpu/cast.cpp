// Casting matrices to 8 bits on a CPU: titan::float8_cast and titan::float8_cast_blocks.
//
// [Note: cast and transpose] Tiles of 64 by 64 elements are cast row by row, transposed in blocks of 8 by 8
// bytes, and written in whole cache lines, because the result's rows are often a power of two apart, so that
// few of them fit into the cache at once.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include <torch/library.h>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include "float8/cast.h"
#include "ops/cpu/simd.h"

namespace titan::float8 {
namespace {

namespace simd = ops::simd;
using simd::Floats;
using simd::Ints;
using simd::Words;

constexpr int64_t kLanes = simd::kWidth<float>;
constexpr int64_t kTile = 64;

// ---- fp32 to 8 bits, eight at a time, with the same results as c10's conversion

// A format's constants. A number below `smallest_normal` is rounded by an addition that shifts its last bits
// out of fp32.
struct E4m3 {
  static constexpr at::ScalarType dtype = at::kFloat8_e4m3fn;
  static constexpr uint32_t largest = 0x43e00000;          // 448
  static constexpr uint32_t smallest_normal = 121u << 23;  // 2^-6
  static constexpr uint32_t shift_down = 141u << 23;
  static constexpr int mantissa_shift = 20;
  static constexpr uint32_t rebias = (static_cast<uint32_t>(7 - 127) << 23) + 0x7ffff;
};
struct E5m2 {
  static constexpr at::ScalarType dtype = at::kFloat8_e5m2;
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

// Rounds to nearest, ties to even, clamped to the format's range. NaN stays NaN and keeps its sign. One byte
// per lane.
template <class Format>
TITAN_INLINE Words to_float8(Floats x) {
  const Words bits = reinterpret_cast<Words>(x), sign = bits & 0x80000000u;
  const Words magnitude = bits ^ sign;
  // Compared as signed numbers, as AVX2 does; magnitudes have no sign bit.
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
  using Bytes8 = uint8_t __attribute__((vector_size(8)));
  const Bytes8 bytes = __builtin_convertvector(lanes, Bytes8);
  std::memcpy(to, &bytes, sizeof bytes);
}

// ---- tiles [kTile, kTile]

using EightRows = uint64_t __attribute__((vector_size(32)));  // eight bytes of one row in each of four blocks

// From row i of each of the four 8 x 8 blocks to column i of each (Warren, "Hacker's Delight", 7-3).
template <int kDistance, uint64_t kMask>
TITAN_INLINE void swap_halves(EightRows (&rows)[8]) {
  for (int i = 0; i < 8; ++i) {
    if (i & kDistance) continue;
    const EightRows changed = ((rows[i] >> (8 * kDistance)) ^ rows[i + kDistance]) & (EightRows{} + kMask);
    rows[i + kDistance] ^= changed;
    rows[i] ^= changed << (8 * kDistance);
  }
}
TITAN_INLINE void transpose_blocks(EightRows (&rows)[8]) {
  swap_halves<4, 0x00000000ffffffff>(rows);
  swap_halves<2, 0x0000ffff0000ffff>(rows);
  swap_halves<1, 0x00ff00ff00ff00ff>(rows);
}

TITAN_INLINE void transpose_tile(uint8_t* transposed, const uint8_t* tile) {
  for (int64_t top = 0; top < kTile; top += 8)
    for (int64_t left = 0; left < kTile; left += 32) {
      EightRows rows[8];
      for (int64_t i = 0; i < 8; ++i)
        std::memcpy(&rows[i], tile + (top + i) * kTile + left, sizeof(EightRows));
      transpose_blocks(rows);
      for (int64_t block = 0; block < 4; ++block)
        for (int64_t i = 0; i < 8; ++i) {
          const uint64_t bytes = rows[i][block];
          std::memcpy(transposed + (left + 8 * block + i) * kTile + top, &bytes, 8);
        }
    }
}

// One scale for all elements (`step` 0), or one per row of the result (`step` 1).
struct Scales {
  const float* values;
  int64_t step;
};

// Casts `count` <= kTile elements of a row of x, each by its column's scale.
template <class Format, class T>
TITAN_INLINE void cast_tile_row(uint8_t* out, const T* x, Scales scales, int64_t count) {
  for (int64_t i = 0; i < kTile; i += kLanes) {
    const Floats scale = scales.step == 0 ? simd::broadcast<Floats>(scales.values[0])
                                          : simd::load_up_to(scales.values + i, count - i);
    const Floats values = i < count ? simd::load_up_to(x + i, count - i) : Floats{};
    store_bytes(out + i, to_float8<Format>(values * scale));
  }
}

// ---- matrices

template <class T>
struct Matrix {
  const T* data;
  int64_t rows, columns;
};

bool has_kernel(const at::Tensor& x) {
  return x.is_contiguous() && (x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16);
}

// Calls run.operator()<Format>(Matrix<T>) with the matrix's type T and the format of `dtype`.
template <class Run>
void dispatch(const at::Tensor& x, at::ScalarType dtype, const Run& run) {
  const auto with_format = [&]<class Format>(Format) {
    if (x.scalar_type() == at::kFloat) {
      run.template operator()<Format>(Matrix<float>{x.const_data_ptr<float>(), x.size(0), x.size(1)});
    } else {
      run.template operator()<Format>(
          Matrix<c10::BFloat16>{x.const_data_ptr<c10::BFloat16>(), x.size(0), x.size(1)});
    }
  };
  dtype == E4m3::dtype ? with_format(E4m3{}) : with_format(E5m2{});
}

// Divides tiles of columns among the threads: run(first column, number of columns).
template <class Run>
void over_tiles(int64_t columns, int64_t grain, const Run& run) {
  const int64_t tiles = (columns + kTile - 1) / kTile;
  at::parallel_for(0, tiles, std::max<int64_t>(1, grain), [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) run(tile * kTile, std::min(kTile, columns - tile * kTile));
  });
}

// ---- one scale for a matrix or a vector: float8_cast

// Casts `count` elements by one scale.
template <class Format, class T>
TITAN_CPU_CLONES void cast_run(uint8_t* out, const T* x, float scale, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store_bytes(out + i, to_float8<Format>(simd::load(x + i) * scale));
  if (i == count) return;
  const Words rest = to_float8<Format>(simd::load_up_to(x + i, count - i) * scale);
  for (int64_t lane = 0; i + lane < count; ++lane) out[i + lane] = static_cast<uint8_t>(rest[lane]);
}

// Casts columns [first, first + count) of x to rows of `out` [columns, rows].
template <class Format, class T>
TITAN_CPU_CLONES void cast_transposed(uint8_t* out, Matrix<T> x, Scales scales, int64_t first,
                                      int64_t count) {
  alignas(64) uint8_t tile[kTile * kTile] = {};
  alignas(64) uint8_t transposed[kTile * kTile];
  scales.values += scales.step * first;
  for (int64_t row = 0; row < x.rows; row += kTile) {
    const int64_t height = std::min(kTile, x.rows - row);
    for (int64_t i = 0; i < height; ++i)
      cast_tile_row<Format>(tile + i * kTile, x.data + (row + i) * x.columns + first, scales, count);
    transpose_tile(transposed, tile);
    for (int64_t column = 0; column < count; ++column) {
      uint8_t* to = out + (first + column) * x.rows + row;
      if (height == kTile) {  // a size that the compiler knows
        std::memcpy(to, transposed + column * kTile, kTile);
      } else {
        std::memcpy(to, transposed + column * kTile, static_cast<size_t>(height));
      }
    }
  }
}

template <class Format, class T>
void cast_matrix(uint8_t* out, Matrix<T> x, Scales scales, bool transposed) {
  constexpr int64_t kRun = 32768;  // elements worth a thread
  if (transposed)
    return over_tiles(x.columns, 1024 / std::max<int64_t>(x.rows, 1), [&](int64_t first, int64_t count) {
      cast_transposed<Format>(out, x, scales, first, count);
    });
  if (scales.step == 0)
    return at::parallel_for(0, x.rows * x.columns, kRun, [&](int64_t begin, int64_t end) {
      cast_run<Format>(out + begin, x.data + begin, scales.values[0], end - begin);
    });
  const int64_t grain = std::max<int64_t>(1, kRun / std::max<int64_t>(x.columns, 1));
  at::parallel_for(0, x.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      cast_run<Format>(out + row * x.columns, x.data + row * x.columns, scales.values[row], x.columns);
  });
}

at::Tensor cast_cpu(const at::Tensor& x, const at::Tensor& scale, at::ScalarType dtype, bool transposed) {
  if (!has_kernel(x)) return composite::cast(x, scale, dtype, transposed);
  const at::Tensor contiguous_scale = scale.contiguous();
  const Scales scales{contiguous_scale.const_data_ptr<float>(), scale.numel() > 1 ? 1 : 0};
  const int64_t rows = x.size(0), columns = x.size(1);
  at::Tensor out =
      at::empty({transposed ? columns : rows, transposed ? rows : columns}, x.options().dtype(dtype));
  auto* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  dispatch(x, dtype, [&]<class Format, class T>(Matrix<T> matrix) {
    cast_matrix<Format>(to, matrix, scales, transposed);
  });
  return out;
}

// ---- blocks of 32: float8_cast_blocks. One pass, because a block fits into the first-level cache.

// The exponent of a block's scale, from the fp32 bits of its largest `magnitude`.
template <class Format>
TITAN_INLINE int exponent_of(uint32_t magnitude, bool round_up) {
  if (magnitude >= 0x7f800000u) return kNotFinite;
  if (!round_up) {
    const int exponent = static_cast<int>(magnitude >> 23) - largest_exponent(Format::dtype);
    return exponent < 0 ? 0 : exponent;
  }
  const float end = std::bit_cast<float>(Format::largest);
  const auto bits = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) / end);
  const uint32_t exponent = bits >> 23, mantissa = bits & 0x7fffff;
  return static_cast<int>(exponent == 0 ? mantissa > 0x400000 : exponent + (mantissa > 0));
}

// [Note: factors of blocks]
TITAN_INLINE float factor_of(int exponent, bool round_up) {
  if (exponent == kNotFinite) return 0.0F;
  if (exponent == 0 && round_up) return 1.0F;
  return std::bit_cast<float>(static_cast<uint32_t>(254 - (exponent < 1 ? 1 : exponent)) << 23);
}

// Writes the exponent to `scale` and returns the factor.
template <class Format>
TITAN_INLINE float write_exponent(uint8_t* scale, int32_t magnitude, bool round_up) {
  const int exponent = exponent_of<Format>(static_cast<uint32_t>(magnitude), round_up);
  *scale = static_cast<uint8_t>(exponent);
  return factor_of(exponent, round_up);
}

// [Note: magnitudes as integers] in scales.cpp.
TITAN_INLINE Ints magnitude_bits(Floats x) { return reinterpret_cast<Ints>(x) & 0x7fffffff; }
TITAN_INLINE Ints larger_bits(Ints a, Ints b) { return a > b ? a : b; }

// Casts `count` <= 32 elements; the rest of the 32 bytes becomes zero.
template <class Format, class T>
TITAN_INLINE void cast_block(uint8_t* out, uint8_t* scale, const T* x, bool round_up, int64_t count) {
  constexpr int64_t kVectors = kBlock / kLanes;
  Floats values[kVectors];
  Ints largest{};
  for (int64_t i = 0; i < kVectors; ++i) {
    const int64_t first = i * kLanes;
    values[i] = first + kLanes <= count ? simd::load(x + first)
                : first < count         ? simd::load_up_to(x + first, count - first)
                                        : Floats{};
    largest = larger_bits(largest, magnitude_bits(values[i]));
  }
  int32_t magnitude = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) magnitude = std::max<int32_t>(magnitude, largest[lane]);
  const float factor = write_exponent<Format>(scale, magnitude, round_up);
  for (int64_t i = 0; i < kVectors; ++i) store_bytes(out + i * kLanes, to_float8<Format>(values[i] * factor));
}

template <class Format, class T>
TITAN_CPU_CLONES void cast_row_in_blocks(uint8_t* out, uint8_t* scales, const T* x, bool round_up,
                                         int64_t columns) {
  for (int64_t first = 0; first < columns; first += kBlock)
    cast_block<Format>(out + first, scales + first / kBlock, x + first, round_up,
                       std::min(kBlock, columns - first));
}

// The result of a cast in blocks: data [vectors, blocks * 32], exponents [vectors, blocks].
struct BlockOutput {
  uint8_t* data;
  uint8_t* exponents;
  int64_t blocks;
  bool round_up;
};

// For one block of each of `count` <= kTile columns, x's rows [row, row + rows), rows <= 32: writes exponents
// and returns factors.
template <class Format, class T>
TITAN_INLINE void column_factors(float* factors, BlockOutput out, Matrix<T> x, int64_t first, int64_t count) {
  Ints largest[kTile / kLanes] = {};
  const int64_t rows = std::min(kBlock, x.rows);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < count; i += kLanes) {
      const Floats values =
          simd::load_up_to(x.data + row * x.columns + first + i, std::min(kLanes, count - i));
      largest[i / kLanes] = larger_bits(largest[i / kLanes], magnitude_bits(values));
    }
  for (int64_t column = 0; column < count; ++column)
    factors[column] = write_exponent<Format>(out.exponents + (first + column) * out.blocks,
                                             largest[column / kLanes][column % kLanes], out.round_up);
}

// Casts columns [first, first + count) of x to rows of the result.
template <class Format, class T>
TITAN_CPU_CLONES void cast_columns_in_blocks(BlockOutput out, Matrix<T> x, int64_t first, int64_t count) {
  alignas(64) uint8_t tile[kTile * kTile];
  alignas(64) uint8_t transposed[kTile * kTile];
  float factors[kTile] = {};
  const int64_t padded = out.blocks * kBlock;
  for (int64_t top = 0; top < padded; top += kTile) {
    const int64_t height = std::min(kTile, padded - top);
    for (int64_t row = top; row < top + height; row += kBlock) {
      const Matrix<T> block{x.data + row * x.columns, std::min(kBlock, x.rows - row), x.columns};
      column_factors<Format>(factors, {out.data, out.exponents + row / kBlock, out.blocks, out.round_up},
                             block, first, count);
      uint8_t* to = tile + (row - top) * kTile;
      for (int64_t i = 0; i < block.rows; ++i)
        cast_tile_row<Format>(to + i * kTile, block.data + i * x.columns + first, {factors, 1}, count);
      std::memset(to + block.rows * kTile, 0, static_cast<size_t>((kBlock - block.rows) * kTile));
    }
    transpose_tile(transposed, tile);
    for (int64_t column = 0; column < count; ++column)
      std::memcpy(out.data + (first + column) * padded + top, transposed + column * kTile,
                  static_cast<size_t>(height));
  }
}

template <class Format, class T>
void cast_matrix_in_blocks(BlockOutput out, Matrix<T> x, bool transposed) {
  if (transposed)
    return over_tiles(x.columns, 512 / x.rows, [&](int64_t first, int64_t count) {
      cast_columns_in_blocks<Format>(out, x, first, count);
    });
  const int64_t grain = std::max<int64_t>(1, 16384 / x.columns);
  at::parallel_for(0, x.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      cast_row_in_blocks<Format>(out.data + row * out.blocks * kBlock, out.exponents + row * out.blocks,
                                 x.data + row * x.columns, out.round_up, x.columns);
  });
}

std::tuple<at::Tensor, at::Tensor> cast_blocks_cpu(const at::Tensor& x, at::ScalarType dtype, bool round_up,
                                                   bool transposed, bool for_hardware) {
  if (!has_kernel(x)) return composite::cast_blocks(x, dtype, round_up, transposed, for_hardware);
  const int64_t elements = x.size(transposed ? 0 : 1), vectors = x.size(transposed ? 1 : 0);
  const int64_t blocks = (elements + kBlock - 1) / kBlock;
  at::Tensor data = at::empty({vectors, blocks * kBlock}, x.options().dtype(dtype));
  at::Tensor scale = at::empty({vectors, blocks}, x.options().dtype(at::kFloat8_e8m0fnu));
  const BlockOutput out{static_cast<uint8_t*>(data.mutable_data_ptr()),
                        static_cast<uint8_t*>(scale.mutable_data_ptr()), blocks, round_up};
  dispatch(x, dtype, [&]<class Format, class T>(Matrix<T> matrix) {
    cast_matrix_in_blocks<Format>(out, matrix, transposed);
  });
  return {data, for_hardware ? blocked_layout(scale) : scale};
}

TORCH_LIBRARY_IMPL(titan, CPU, m) {
  m.impl("float8_cast", cast_cpu);
  m.impl("float8_cast_blocks", cast_blocks_cpu);
}

}  // namespace
}  // namespace titan::float8

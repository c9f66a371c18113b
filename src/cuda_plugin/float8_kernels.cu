// So far these have run on virtual GPUs only (docs/verified_on.md). Each kernel is one pass and memory-bound, so a
// thread reads 16 bytes at a time if the rows allow it.

#include "cuda_plugin/float8_kernels.h"

#include <cuda_fp8.h>

#include <algorithm>
#include <type_traits>

#include "cuda_plugin/launch.h"
#include "cuda_plugin/pack.h"

namespace titan::float8::cuda {

namespace {

using namespace titan::cuda;

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 4096;
constexpr int64_t kMaxGrid = 65535;  // in y and z
constexpr int kBlock = 32;           // elements with one scale
constexpr int kNotFinite = 255;      // an exponent

// ---- magnitudes

// See [Note: magnitudes as integers] in src/float8/cpu/scales.cpp: a NaN is the largest.
template <class T>
__device__ unsigned magnitude(T x) {
  return __float_as_uint(widen(x)) & 0x7fffffffu;
}

// In all threads.
constexpr int kMaxRowThreads = 512;
__device__ unsigned largest_of_block(unsigned mine) {
  __shared__ unsigned of_warps[kMaxRowThreads / kWarp];
  mine = __reduce_max_sync(kAllLanes, mine);
  __syncthreads();  // all have read the values of the call before
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = mine;
  __syncthreads();
  unsigned best = of_warps[0];
  for (unsigned warp = 1; warp < blockDim.x / kWarp; ++warp) best = max(best, of_warps[warp]);
  return best;
}

template <class T>
__device__ unsigned largest_of(const T* x, int64_t count, int64_t first, int64_t step) {
  unsigned best = 0;
  const bool packed = reinterpret_cast<uintptr_t>(x) % sizeof(Pack<T>) == 0;
  const int64_t packs = packed ? count / Pack<T>::kSize : 0;
  for (int64_t i = first; i < packs; i += step) {
    const Pack<T> pack = reinterpret_cast<const Pack<T>*>(x)[i];
    for (const T value : pack.values) best = max(best, magnitude(value));
  }
  for (int64_t i = packs * Pack<T>::kSize + first; i < count; i += step) best = max(best, magnitude(x[i]));
  return best;
}

// Each thread block writes the largest of its part. The kernel that needs the largest of all reads all of them, so nothing is zeroed
// before, and no thread waits for another block's.
template <class T>
__global__ void magnitudes_kernel(float* out, const T* x, int64_t count) {
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const unsigned best = largest_of_block(largest_of(x, count, first, int64_t{gridDim.x} * kThreads));
  if (threadIdx.x == 0) out[blockIdx.x] = __uint_as_float(best);
}

template <class T>
__global__ void amax_of_rows_kernel(float* out, const T* x, int64_t rows, int64_t columns) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const unsigned best = largest_of_block(largest_of(x + row * columns, columns, threadIdx.x, kThreads));
    if (threadIdx.x == 0) out[row] = __uint_as_float(best);
  }
}

// A lane has a pack of columns, and each warp every eighth row of the part.
template <class T>
__global__ void magnitudes_of_columns_kernel(T* out, const T* x, int64_t rows, int64_t columns,
                                             int64_t rows_per_part) {
  constexpr int kSize = Pack<T>::kSize, kWarps = kThreads / kWarp;
  __shared__ unsigned of_warps[kWarps][kWarp * kSize];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t column = (int64_t{blockIdx.x} * kWarp + lane) * kSize;
  const bool packed = reinterpret_cast<uintptr_t>(x) % sizeof(Pack<T>) == 0 && columns % kSize == 0;
  const int64_t end = min(rows, (blockIdx.y + int64_t{1}) * rows_per_part);
  unsigned best[kSize] = {};
  for (int64_t row = blockIdx.y * rows_per_part + warp; row < end; row += kWarps) {
    const T* from = x + row * columns + column;
    if (packed && column < columns) {
      const Pack<T> pack = *reinterpret_cast<const Pack<T>*>(from);
#pragma unroll
      for (int e = 0; e < kSize; ++e) best[e] = max(best[e], magnitude(pack.values[e]));
    } else {
#pragma unroll
      for (int e = 0; e < kSize; ++e)
        if (column + e < columns) best[e] = max(best[e], magnitude(from[e]));
    }
  }
#pragma unroll
  for (int e = 0; e < kSize; ++e) of_warps[warp][e * kWarp + lane] = best[e];
  __syncthreads();
  for (int i = threadIdx.x; i < kWarp * kSize; i += kThreads) {
    unsigned largest = 0;
    for (int w = 0; w < kWarps; ++w) largest = max(largest, of_warps[w][i % kSize * kWarp + i / kSize]);
    const int64_t place = int64_t{blockIdx.x} * kWarp * kSize + i;
    if (place < columns) out[blockIdx.y * columns + place] = narrow<T>(__uint_as_float(largest));
  }
}

// ---- scales

// A quotient of two fp32 numbers that is rounded to double and then to fp32 is the correctly rounded one, because double has more than
// twice the bits. The double 1e-12 is between two fp32 numbers, of which 1e-12f is the lower one.
__device__ float scale_for(float amax, ScaleOptions options) {
  const float scale = amax <= 1e-12f ? options.scale_of_least : __fdiv_rn(options.largest, amax);
  return options.power_of_two && !isnan(scale) ? __uint_as_float(__float_as_uint(scale) & 0x7f800000u)
                                               : scale;
}

__global__ void scale_kernel(float* out, const float* amax, int64_t count, ScaleOptions options) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) out[i] = scale_for(amax[i], options);
}

__device__ float largest_of_parts(const float* magnitudes, int64_t count) {
  return __uint_as_float(largest_of_block(largest_of(magnitudes, count, threadIdx.x, blockDim.x)));
}

// Every thread block finds the scale, in all its threads; the first one writes it.
__device__ float scale_of_matrix(const MatrixScale& from) {
  const float scale =
      from.scale ? *from.scale : scale_for(largest_of_parts(from.magnitudes, from.count), from.options);
  if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) {
    if (from.scale_out) *from.scale_out = scale;
    if (from.inverse_out) *from.inverse_out = __fdiv_rn(1.0f, scale);
  }
  return scale;
}

// ---- casts

// The instruction turns every NaN into the same one, but LibTorch's conversion keeps its sign.
template <Format format>
__device__ uint8_t to_float8(float x) {
  if (isnan(x)) return 0x7f | (__float_as_uint(x) >> 31 << 7);
  return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, format == Format::E4m3 ? __NV_E4M3 : __NV_E5M2);
}

// A thread reads a chunk at a time, and writes it as 16 bytes.
constexpr int kChunk = 16;
template <class T>
struct Chunk {
  T values[kChunk];
};

template <class T>
bool __device__ takes_chunks(const T* x, int64_t stride) {
  return reinterpret_cast<uintptr_t>(x) % 16 == 0 && stride % kChunk == 0;
}

// `left` elements are there; the others are zeros. `whole`: chunks are aligned, and `left` is a multiple of their size.
template <class T>
__device__ Chunk<T> load_chunk(const T* from, int64_t left, bool whole) {
  constexpr int kSize = Pack<T>::kSize;
  Chunk<T> chunk;
  if (whole && left >= kChunk) {
#pragma unroll
    for (int k = 0; k < kChunk / kSize; ++k) {
      const Pack<T> pack = reinterpret_cast<const Pack<T>*>(from)[k];
#pragma unroll
      for (int e = 0; e < kSize; ++e) chunk.values[k * kSize + e] = pack.values[e];
    }
  } else {
#pragma unroll
    for (int e = 0; e < kChunk; ++e) chunk.values[e] = e < left ? from[e] : narrow<T>(0.0f);
  }
  return chunk;
}

// Calls value(e) for each of 16 elements.
template <Format format, class Value>
__device__ uint4 cast_chunk(Value value) {
  unsigned words[kChunk / 4] = {};
#pragma unroll
  for (int e = 0; e < kChunk; ++e) words[e / 4] |= unsigned{to_float8<format>(value(e))} << (e % 4 * 8);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ inline void store_chunk(uint8_t* to, uint4 bytes, int64_t left, bool whole) {
  if (whole && left >= kChunk) {
    *reinterpret_cast<uint4*>(to) = bytes;
    return;
  }
  const unsigned words[] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
  for (int e = 0; e < kChunk; ++e)
    if (e < left) to[e] = static_cast<uint8_t>(words[e / 4] >> (e % 4 * 8));
}

// By one scale.
template <Format format, class T>
__global__ void cast_kernel(uint8_t* out, const T* x, int64_t count, MatrixScale from) {
  const float scale = scale_of_matrix(from);
  const bool whole = takes_chunks(x, kChunk) && takes_chunks(out, kChunk);
  const int64_t step = int64_t{gridDim.x} * kThreads * kChunk;
  for (int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kChunk; i < count; i += step) {
    const Chunk<T> chunk = load_chunk(x + i, count - i, whole);
    store_chunk(out + i, cast_chunk<format>([&](int e) { return widen(chunk.values[e]) * scale; }), count - i,
                whole);
  }
}

// Each row by its scale.
template <Format format, class T>
__global__ void cast_by_rows_kernel(uint8_t* out, const T* x, int64_t rows, int64_t columns,
                                    const float* scales) {
  const bool whole = takes_chunks(x, columns) && takes_chunks(out, columns);
  const int64_t chunks = (columns + kChunk - 1) / kChunk, step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < rows * chunks; i += step) {
    const int64_t row = i / chunks, column = i % chunks * kChunk, place = row * columns + column;
    const float scale = scales[row];
    const Chunk<T> chunk = load_chunk(x + place, columns - column, whole);
    store_chunk(out + place, cast_chunk<format>([&](int e) { return widen(chunk.values[e]) * scale; }),
                columns - column, whole);
  }
}

// Measures and casts rows that stay in registers in between, and measures the columns of the thread block's rows.
constexpr int kRowChunks = 2;  // in a thread
static_assert(kMaxRowOfRegisters == kMaxRowThreads * kRowChunks * kChunk);
template <Format format, class T>
__global__ void __launch_bounds__(kMaxRowThreads)
    measured_rows_kernel(MeasuredRows out, const T* x, int64_t rows, int columns, ScaleOptions options) {
  const int chunks = columns / kChunk;
  unsigned of_columns[kRowChunks][kChunk] = {};
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    Chunk<T> held[kRowChunks];
    unsigned best = 0;
#pragma unroll
    for (int k = 0; k < kRowChunks; ++k) {
      const int i = threadIdx.x + k * blockDim.x;
      if (i >= chunks) continue;
      held[k] = load_chunk(x + row * columns + i * kChunk, kChunk, true);
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        const unsigned size = magnitude(held[k].values[e]);
        best = max(best, size);
        of_columns[k][e] = max(of_columns[k][e], size);
      }
    }
    const float scale = scale_for(__uint_as_float(largest_of_block(best)), options);
    if (threadIdx.x == 0) {
      out.scale[row] = scale;
      out.inverse[row] = __fdiv_rn(1.0f, scale);
    }
#pragma unroll
    for (int k = 0; k < kRowChunks; ++k) {
      const int i = threadIdx.x + k * blockDim.x;
      if (i >= chunks) continue;
      const uint4 bytes = cast_chunk<format>([&](int e) { return widen(held[k].values[e]) * scale; });
      store_chunk(out.data + row * columns + i * kChunk, bytes, kChunk, true);
    }
  }
  if (!out.magnitudes) return;
  constexpr int kSize = Pack<T>::kSize;
  auto* to = reinterpret_cast<Pack<T>*>(static_cast<T*>(out.magnitudes) + int64_t{blockIdx.x} * columns);
#pragma unroll
  for (int k = 0; k < kRowChunks; ++k) {
    const int i = threadIdx.x + k * blockDim.x;
    if (i >= chunks) continue;
#pragma unroll
    for (int pack = 0; pack < kChunk / kSize; ++pack) {
      Pack<T> largest;
#pragma unroll
      for (int e = 0; e < kSize; ++e)
        largest.values[e] = narrow<T>(__uint_as_float(of_columns[k][pack * kSize + e]));
      to[i * (kChunk / kSize) + pack] = largest;
    }
  }
}

// Casts tiles of 128 by 128, each read once, and transposes them in shared memory, so that both sides are written 16 bytes at a time
// along their rows.
constexpr int kTile = 128, kTileChunks = kTile / kChunk;

// The scale of each column of a strip of tiles, in `scales`.
template <class T>
__device__ void find_scales_of_columns(float* scales, const ColumnScales& from, int64_t first,
                                       int64_t columns) {
  __shared__ unsigned of_halves[kThreads / kTile][kTile];
  const int i = threadIdx.x % kTile, half = threadIdx.x / kTile;
  const int64_t column = first + i;
  unsigned best = 0;
  if (!from.scale && column < columns)
    for (int64_t part = half; part < from.count; part += kThreads / kTile)
      best = max(best, magnitude(static_cast<const T*>(from.magnitudes)[part * columns + column]));
  of_halves[half][i] = best;
  __syncthreads();
  if (half == 0) {
    float scale = 0;
    if (column < columns)
      scale = from.scale ? from.scale[column]
                         : scale_for(__uint_as_float(max(best, of_halves[1][i])), from.options);
    scales[i] = scale;
    if (blockIdx.x == 0 && column < columns && from.scale_out) {
      from.scale_out[column] = scale;
      from.inverse_out[column] = __fdiv_rn(1.0f, scale);
    }
  }
  __syncthreads();
}

template <Format format, class T, class Scale>
__global__ void __launch_bounds__(kThreads)
    cast_tiles_kernel(CastTiles out, const T* x, int64_t rows, int64_t columns, Scale from) {
  constexpr bool kByColumn = std::is_same_v<Scale, ColumnScales>;
  constexpr int kSteps = kTile * kTileChunks / kThreads;
  // Chunk c of row r is at place c ^ (r / 16), so that threads which read a column read different banks.
  __shared__ uint4 tile[kTile][kTileChunks];
  __shared__ float scales[kTile];
  float scale = 0;
  if constexpr (!kByColumn) scale = scale_of_matrix(from);
  const bool whole = takes_chunks(x, columns) && takes_chunks(out.rows, columns);
  const bool whole_columns = takes_chunks(out.columns, rows);
  const int inner = threadIdx.x % kTileChunks, outer = threadIdx.x / kTileChunks;
  const int64_t strips = (columns + kTile - 1) / kTile, tiles = (rows + kTile - 1) / kTile;
  for (int64_t strip = blockIdx.y; strip < strips; strip += gridDim.y) {
    if constexpr (kByColumn) find_scales_of_columns<T>(scales, from, strip * kTile, columns);
    const int64_t column = strip * kTile + inner * kChunk;
    for (int64_t first_row = blockIdx.x * int64_t{kTile}; first_row < tiles * kTile;
         first_row += gridDim.x * int64_t{kTile}) {
      Chunk<T> chunks[kSteps];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int64_t row = first_row + step * (kThreads / kTileChunks) + outer;
        chunks[step] = load_chunk(x + row * columns + column, row < rows ? columns - column : 0, whole);
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int r = step * (kThreads / kTileChunks) + outer;
        const uint4 bytes = cast_chunk<format>([&](int e) {
          return widen(chunks[step].values[e]) * (kByColumn ? scales[inner * kChunk + e] : scale);
        });
        tile[r][inner ^ (r / kChunk)] = bytes;
        const int64_t row = first_row + r;
        if (out.rows && row < rows)
          store_chunk(out.rows + row * columns + column, bytes, columns - column, whole);
      }
      __syncthreads();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int c = step * (kThreads / kTileChunks) + outer;
        const auto* bytes = reinterpret_cast<const uint8_t*>(tile[inner * kChunk]) +
                            ((c / kChunk) ^ inner) * kChunk + c % kChunk;
        unsigned words[kChunk / 4] = {};
#pragma unroll
        for (int e = 0; e < kChunk; ++e) words[e / 4] |= unsigned{bytes[e * kTile]} << (e % 4 * 8);
        const int64_t to_row = strip * kTile + c, to_column = first_row + inner * kChunk;
        if (to_row < columns)
          store_chunk(out.columns + to_row * rows + to_column,
                      make_uint4(words[0], words[1], words[2], words[3]), rows - to_column, whole_columns);
      }
      __syncthreads();
    }
  }
}

// The sums of a product, scaled by its rows and columns.
template <class From, class To>
__global__ void scale_sums_kernel(To* out, const From* sums, SumScales scales, int64_t rows,
                                  int64_t columns) {
  const int64_t count = rows * columns, step = int64_t{gridDim.x} * kThreads;
  constexpr int kSize = 8;
  const bool packed = columns % kSize == 0 &&
                      reinterpret_cast<uintptr_t>(sums) % (kSize * sizeof(From)) == 0 &&
                      reinterpret_cast<uintptr_t>(out) % (kSize * sizeof(To)) == 0;
  struct alignas(kSize * sizeof(From)) Sums {
    From values[kSize];
  };
  struct alignas(kSize * sizeof(To)) Results {
    To values[kSize];
  };
  const auto scaled = [&](From sum, int64_t row, int64_t column) {
    return narrow<To>(widen(sum) * scales.of_rows[scales.rows > 1 ? row : 0] *
                      scales.of_columns[scales.columns > 1 ? column : 0]);
  };
  if (!packed) {
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step)
      out[i] = scaled(sums[i], i / columns, i % columns);
    return;
  }
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count / kSize; i += step) {
    const Sums from = reinterpret_cast<const Sums*>(sums)[i];
    Results to;
    const int64_t row = i * kSize / columns, column = i * kSize % columns;
#pragma unroll
    for (int e = 0; e < kSize; ++e) to.values[e] = scaled(from.values[e], row, column + e);
    reinterpret_cast<Results*>(out)[i] = to;
  }
}

// ---- blocks of 32

// The constants of src/float8/cast.h, which this file can't include.
template <Format format>
__device__ int exponent_of(unsigned magnitude, bool round_up) {
  if (magnitude >= 0x7f800000u) return kNotFinite;
  if (!round_up) return max(static_cast<int>(magnitude >> 23) - (format == Format::E4m3 ? 8 : 15), 0);
  const float end = format == Format::E4m3 ? 448.0f : 57344.0f;
  const unsigned bits = __float_as_uint(__fdiv_rn(__uint_as_float(magnitude), end));
  const unsigned exponent = bits >> 23, mantissa = bits & 0x7fffffu;
  return exponent == 0 ? mantissa > 0x400000u : exponent + (mantissa > 0);
}
__device__ float factor_of(int exponent, bool round_up) {
  if (exponent == kNotFinite) return 0.0f;
  if (exponent == 0 && round_up) return 1.0f;
  return __uint_as_float(static_cast<unsigned>(254 - max(exponent, 1)) << 23);
}

// One warp per block, one lane per element. Warps of a thread block process neighboring blocks.
template <Format format, class T>
__global__ void row_blocks_kernel(CastBlocks out, const T* x, int64_t rows, int64_t columns, bool round_up) {
  const int64_t blocks = (columns + kBlock - 1) / kBlock;
  const int lane = threadIdx.x % kWarp;
  const int64_t step = int64_t{gridDim.x} * (kThreads / kWarp);
  for (int64_t i = int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp; i < rows * blocks;
       i += step) {
    const int64_t row = i / blocks, column = i % blocks * kBlock + lane;
    const float value = column < columns ? widen(x[row * columns + column]) : 0.0f;
    const int exponent = exponent_of<format>(__reduce_max_sync(0xffffffffu, magnitude(value)), round_up);
    out.data[i * kBlock + lane] = to_float8<format>(value * factor_of(exponent, round_up));
    if (lane == 0) out.exponents[i] = static_cast<uint8_t>(exponent);
  }
}

// One thread per block: it reads 32 elements of its column, while its neighbors read those of the next
// columns, and writes 32 bytes of a row.
template <Format format, class T>
__global__ void column_blocks_kernel(CastBlocks out, const T* x, int64_t rows, int64_t columns,
                                     bool round_up) {
  const int64_t blocks = (rows + kBlock - 1) / kBlock;
  const int64_t column = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (column >= columns) return;
  for (int64_t block = blockIdx.y; block < blocks; block += gridDim.y) {
    float values[kBlock];
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const int64_t row = block * kBlock + i;
      values[i] = row < rows ? widen(x[row * columns + column]) : 0.0f;
      largest = max(largest, magnitude(values[i]));
    }
    const int exponent = exponent_of<format>(largest, round_up);
    const float factor = factor_of(exponent, round_up);
    alignas(16) uint8_t bytes[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) bytes[i] = to_float8<format>(values[i] * factor);
    const int64_t place = column * blocks + block;
    auto* to = reinterpret_cast<uint4*>(out.data + place * kBlock);
    to[0] = reinterpret_cast<const uint4*>(bytes)[0];
    to[1] = reinterpret_cast<const uint4*>(bytes)[1];
    out.exponents[place] = static_cast<uint8_t>(exponent);
  }
}

template <class T>
__global__ void amax_of_pieces_kernel(float* out, const AmaxPiece* pieces) {
  const AmaxPiece piece = pieces[blockIdx.x];
  unsigned best = largest_of(static_cast<const T*>(piece.data), piece.count, threadIdx.x, kThreads);
  best = __reduce_max_sync(0xffffffffu, best);
  if (threadIdx.x % kWarp == 0) atomicMax(reinterpret_cast<unsigned*>(out + piece.tensor), best);
}

// One thread block.
__global__ void delayed_scale_kernel(float* out, DelayedScale delayed, ScaleOptions options) {
  const float amax = largest_of_parts(delayed.magnitudes, delayed.count);
  if (threadIdx.x != 0) return;
  if (!isfinite(amax)) {
    *out = __uint_as_float(0x7fc00000u);
    return;
  }
  if (delayed.records) *delayed.pending = fmaxf(*delayed.pending, amax);
  const float largest = *delayed.largest_of_history;
  *out = scale_for(largest > 0 ? largest : amax, options);
}

unsigned blocks_for(int64_t work, int64_t per_block) {
  return static_cast<unsigned>(std::clamp<int64_t>(parts_of(work, per_block), 1, kMaxBlocks));
}

// Calls launch.operator()<format>(T{}).
template <class Launch>
void with_types(Format format, Source source, Launch launch) {
  with_source(source, [&]<class T>(T value) {
    if (format == Format::E4m3)
      launch.template operator()<Format::E4m3>(value);
    else
      launch.template operator()<Format::E5m2>(value);
  });
}

}  // namespace

int64_t parts_of_matrix(const Matrix& x) {
  return std::clamp<int64_t>(parts_of(x.rows * x.columns, kThreads * 32), 1, 1024);
}

void launch_magnitudes(float* out, const Matrix& x, cudaStream_t stream) {
  with_source(x.source, [&]<class T>(T) {
    launch_kernel(magnitudes_kernel<T>, dim3(static_cast<unsigned>(parts_of_matrix(x))), dim3(kThreads),
                  stream, out, static_cast<const T*>(x.data), x.rows * x.columns);
  });
}

void launch_amax_of_rows(float* out, const Matrix& x, cudaStream_t stream) {
  with_source(x.source, [&]<class T>(T) {
    launch_kernel(amax_of_rows_kernel<T>, dim3(blocks_for(x.rows, 1)), dim3(kThreads), stream, out,
                  static_cast<const T*>(x.data), x.rows, x.columns);
  });
}

namespace {
constexpr int64_t kMaxParts = 256;  // a column's
int64_t rows_per_part(const Matrix& x) { return std::max<int64_t>(256, parts_of(x.rows, kMaxParts)); }
}  // namespace

int64_t parts_of_columns(const Matrix& x) { return parts_of(x.rows, rows_per_part(x)); }

void launch_magnitudes_of_columns(void* out, const Matrix& x, cudaStream_t stream) {
  with_source(x.source, [&]<class T>(T) {
    const dim3 grid(static_cast<unsigned>(parts_of(x.columns, kWarp * Pack<T>::kSize)),
                    static_cast<unsigned>(parts_of_columns(x)));
    launch_kernel(magnitudes_of_columns_kernel<T>, grid, dim3(kThreads), stream, static_cast<T*>(out),
                  static_cast<const T*>(x.data), x.rows, x.columns, rows_per_part(x));
  });
}

void launch_amax_of_pieces(float* out, const AmaxPiece* pieces, int64_t num_pieces, Source source,
                           cudaStream_t stream) {
  if (num_pieces == 0) return;
  with_source(source, [&]<class T>(T) {
    launch_kernel(amax_of_pieces_kernel<T>, dim3(static_cast<unsigned>(num_pieces)), dim3(kThreads), stream,
                  out, pieces);
  });
}

ScaleOptions scale_options(double largest, bool power_of_two) {
  return {.largest = static_cast<float>(largest),
          .scale_of_least = static_cast<float>(largest / 1e-12),
          .power_of_two = power_of_two};
}

void launch_scale(float* out, const float* amax, int64_t count, const ScaleOptions& options,
                  cudaStream_t stream) {
  launch_kernel(scale_kernel, dim3(static_cast<unsigned>(parts_of(count, kThreads))), dim3(kThreads), stream,
                out, amax, count, options);
}

void launch_delayed_scale(float* out, const DelayedScale& delayed, const ScaleOptions& options,
                          cudaStream_t stream) {
  launch_kernel(delayed_scale_kernel, dim3(1), dim3(kThreads), stream, out, delayed, options);
}

void launch_cast(uint8_t* out, const Matrix& x, Format format, const MatrixScale& scale,
                 cudaStream_t stream) {
  const int64_t count = x.rows * x.columns;
  with_types(format, x.source, [&]<Format to, class T>(T) {
    launch_kernel(cast_kernel<to, T>, dim3(blocks_for(count, kThreads * kChunk)), dim3(kThreads), stream, out,
                  static_cast<const T*>(x.data), count, scale);
  });
}

void launch_cast_by_rows(uint8_t* out, const Matrix& x, Format format, const float* scales,
                         cudaStream_t stream) {
  const unsigned grid = blocks_for(x.rows * parts_of(x.columns, kChunk), kThreads);
  with_types(format, x.source, [&]<Format to, class T>(T) {
    launch_kernel(cast_by_rows_kernel<to, T>, dim3(grid), dim3(kThreads), stream, out,
                  static_cast<const T*>(x.data), x.rows, x.columns, scales);
  });
}

// Few thread blocks with many rows each write and read little for their columns, but enough to fill a GPU.
int64_t parts_of_measured_rows(const Matrix& x) {
  return std::min<int64_t>(x.rows, x.columns <= kMaxRowOfRegisters / 2 ? 2 * kMaxParts : kMaxParts);
}

void launch_measured_rows(const MeasuredRows& out, const Matrix& x, Format format,
                          const ScaleOptions& options, cudaStream_t stream) {
  const auto threads =
      static_cast<unsigned>(std::min<int64_t>(parts_of(x.columns / kChunk, kWarp) * kWarp, kMaxRowThreads));
  const auto grid = static_cast<unsigned>(out.magnitudes ? parts_of_measured_rows(x)
                                                         : std::min<int64_t>(x.rows, kMaxBlocks));
  with_types(format, x.source, [&]<Format to, class T>(T) {
    launch_kernel(measured_rows_kernel<to, T>, dim3(grid), dim3(threads), stream, out,
                  static_cast<const T*>(x.data), x.rows, static_cast<int>(x.columns), options);
  });
}

namespace {

// Each thread block finds its scales before its first tile, so it has several if there are many.
template <class Scale>
void launch_tiles(const CastTiles& out, const Matrix& x, Format format, const Scale& scale,
                  cudaStream_t stream) {
  const int64_t strips = std::min(parts_of(x.columns, kTile), kMaxGrid), tiles = parts_of(x.rows, kTile);
  const int64_t groups = std::min(tiles, std::max<int64_t>(kMaxBlocks / 4 / strips, 1));
  const dim3 grid(static_cast<unsigned>(groups), static_cast<unsigned>(strips));
  with_types(format, x.source, [&]<Format to, class T>(T) {
    launch_kernel(cast_tiles_kernel<to, T, Scale>, grid, dim3(kThreads), stream, out,
                  static_cast<const T*>(x.data), x.rows, x.columns, scale);
  });
}

}  // namespace

void launch_cast_tiles(const CastTiles& out, const Matrix& x, Format format, const MatrixScale& scale,
                       cudaStream_t stream) {
  launch_tiles(out, x, format, scale, stream);
}
void launch_cast_columns(const CastTiles& out, const Matrix& x, Format format, const ColumnScales& scales,
                         cudaStream_t stream) {
  launch_tiles(out, x, format, scales, stream);
}

void launch_scale_sums(void* out, Source to, const Matrix& sums, const SumScales& scales,
                       cudaStream_t stream) {
  const unsigned grid = blocks_for(sums.rows * sums.columns, kThreads * 8);
  with_source(sums.source, [&]<class From>(From) {
    with_source(to, [&]<class To>(To) {
      launch_kernel(scale_sums_kernel<From, To>, dim3(grid), dim3(kThreads), stream, static_cast<To*>(out),
                    static_cast<const From*>(sums.data), scales, sums.rows, sums.columns);
    });
  });
}

void launch_cast_row_blocks(const CastBlocks& out, const Matrix& x, const BlockOptions& options,
                            cudaStream_t stream) {
  const int64_t warps = x.rows * parts_of(x.columns, kBlock);
  const auto grid =
      static_cast<unsigned>(std::clamp<int64_t>(parts_of(warps, kThreads / kWarp), 1, kMaxGrid));
  with_types(options.format, x.source, [&]<Format format, class T>(T) {
    launch_kernel(row_blocks_kernel<format, T>, grid, dim3(kThreads), stream, out,
                  static_cast<const T*>(x.data), x.rows, x.columns, options.round_up);
  });
}

void launch_cast_column_blocks(const CastBlocks& out, const Matrix& x, const BlockOptions& options,
                               cudaStream_t stream) {
  const dim3 grid(parts_of(x.columns, kThreads),
                  static_cast<unsigned>(std::clamp<int64_t>(parts_of(x.rows, kBlock), 1, kMaxGrid)));
  with_types(options.format, x.source, [&]<Format format, class T>(T) {
    launch_kernel(column_blocks_kernel<format, T>, grid, dim3(kThreads), stream, out,
                  static_cast<const T*>(x.data), x.rows, x.columns, options.round_up);
  });
}

}  // namespace titan::float8::cuda

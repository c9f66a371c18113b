// Casts to MXFP8, in blocks of 32 elements with one scale. So far these have run on virtual GPUs only (docs/verified_on.md).

#include "cuda_plugin/float8_numbers.h"
#include "cuda_plugin/launch.h"

namespace titan::float8::cuda {

namespace {

constexpr int kBlock = 32;       // elements with one scale
constexpr int kNotFinite = 255;  // an exponent

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

// Within a tile of 128 vectors by four blocks, vector v is at 16 (v mod 32) + 4 (v / 32).
__device__ int64_t place_of_exponent(const CastBlocks& out, int64_t vector, int64_t block, int64_t blocks) {
  if (!out.for_hardware) return vector * blocks + block;
  const int64_t tile = vector / 128 * ((blocks + 3) / 4) + block / 4;
  return tile * 512 + vector % 32 * 16 + vector % 128 / 32 * 4 + block % 4;
}

// Two neighboring threads per block, each with a chunk of it.
template <Format format, class T>
__global__ void row_blocks_kernel(CastBlocks out, const T* x, int64_t rows, int64_t columns, bool round_up) {
  static_assert(kBlock == 2 * kChunk);
  const int64_t blocks = (columns + kBlock - 1) / kBlock, count = rows * blocks * 2;
  const bool whole = takes_chunks(x, columns);
  const int lane = threadIdx.x % kWarp;
  // Whole warps, whose threads exchange magnitudes.
  for (int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x - lane; first < count;
       first += int64_t{gridDim.x} * kThreads) {
    const int64_t i = first + lane, row = i / (blocks * 2), column = i % (blocks * 2) * kChunk;
    const Chunk<T> chunk = load_chunk(x + row * columns + column, i < count ? columns - column : 0, whole);
    const unsigned mine = largest_of_chunk(chunk), other = __shfl_xor_sync(kAllLanes, mine, 1);
    if (i >= count) continue;
    const int exponent = exponent_of<format>(max(mine, other), round_up);
    const float factor = factor_of(exponent, round_up);
    reinterpret_cast<uint4*>(out.data)[i] =
        cast_chunk<format>([&](int e) { return widen(chunk.values[e]) * factor; });
    if (i % 2 == 0)
      out.exponents[place_of_exponent(out, row, i / 2 % blocks, blocks)] = static_cast<uint8_t>(exponent);
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
    T held[kBlock];  // all are read before the first is used
    const T* from = x + block * kBlock * columns + column;
    const int64_t left = rows - block * kBlock;
    if (left >= kBlock) {
#pragma unroll
      for (int i = 0; i < kBlock; ++i) held[i] = from[i * columns];
    } else {
#pragma unroll
      for (int i = 0; i < kBlock; ++i) held[i] = i < left ? from[i * columns] : narrow<T>(0.0f);
    }
    unsigned largest = 0;
#pragma unroll
    for (const T value : held) largest = max(largest, magnitude(value));
    const int exponent = exponent_of<format>(largest, round_up);
    const float factor = factor_of(exponent, round_up);
    const int64_t place = column * blocks + block;
    auto* to = reinterpret_cast<uint4*>(out.data + place * kBlock);
#pragma unroll
    for (int half = 0; half < kBlock / kChunk; ++half)
      to[half] = cast_chunk<format>([&](int e) { return widen(held[half * kChunk + e]) * factor; });
    out.exponents[place_of_exponent(out, column, block, blocks)] = static_cast<uint8_t>(exponent);
  }
}

// A tile has the 32 rows of one block of each of its columns. Eight threads read a row of it, and two neighboring ones make a block of it, as in
// row_blocks_kernel; then two neighboring threads make a block of a column, each with half of it.
constexpr int kTileColumns = 128;

template <Format format, class T>
__global__ void __launch_bounds__(kThreads, 5)
    both_blocks_kernel(CastBlocks along_rows, CastBlocks down_columns, const T* x, int64_t rows,
                       int64_t columns, bool round_up) {
  constexpr int kRowThreads = kTileColumns / kChunk;
  static_assert(kBlock * kRowThreads == kThreads && kTileColumns * 2 == kThreads && kBlock == 2 * kChunk);
  constexpr int kRowPacks = kTileColumns / Pack<T>::kSize, kPacks = kRowPacks / kRowThreads;
  __shared__ PackBits tile[kBlock][kRowPacks];
  const int64_t row_blocks = (columns + kBlock - 1) / kBlock, column_blocks = (rows + kBlock - 1) / kBlock;
  const int64_t tiles_across = (columns + kTileColumns - 1) / kTileColumns;
  const bool whole = takes_chunks(x, columns);
  const int thread = threadIdx.x;
  for (int64_t i = blockIdx.x; i < tiles_across * column_blocks; i += gridDim.x) {
    const int64_t block = i / tiles_across, first = i % tiles_across * kTileColumns;
    {
      const int64_t row = block * kBlock + thread / kRowThreads;
      const int64_t column = first + thread % kRowThreads * kChunk;
      const Chunk<T> chunk = load_chunk(x + row * columns + column, row < rows ? columns - column : 0, whole);
      const unsigned mine = largest_of_chunk(chunk), other = __shfl_xor_sync(kAllLanes, mine, 1);
      if (row < rows && column < row_blocks * kBlock) {
        const int exponent = exponent_of<format>(max(mine, other), round_up);
        const float factor = factor_of(exponent, round_up);
        reinterpret_cast<uint4*>(along_rows.data)[row * row_blocks * 2 + column / kChunk] =
            cast_chunk<format>([&](int e) { return widen(chunk.values[e]) * factor; });
        if (thread % 2 == 0)
          along_rows.exponents[place_of_exponent(along_rows, row, column / kBlock, row_blocks)] =
              static_cast<uint8_t>(exponent);
      }
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        Pack<T> pack;
#pragma unroll
        for (int e = 0; e < Pack<T>::kSize; ++e) pack.values[e] = chunk.values[p * Pack<T>::kSize + e];
        tile[thread / kRowThreads][thread % kRowThreads * kPacks + p] = __builtin_bit_cast(PackBits, pack);
      }
    }
    __syncthreads();
    {
      const int in_tile = thread / 2, half = thread % 2;
      Chunk<T> chunk;
#pragma unroll
      for (int e = 0; e < kChunk; ++e)
        chunk.values[e] = reinterpret_cast<const T*>(tile[half * kChunk + e])[in_tile];
      const unsigned mine = largest_of_chunk(chunk), other = __shfl_xor_sync(kAllLanes, mine, 1);
      const int64_t column = first + in_tile, place = column * column_blocks + block;
      if (column < columns) {
        const int exponent = exponent_of<format>(max(mine, other), round_up);
        const float factor = factor_of(exponent, round_up);
        reinterpret_cast<uint4*>(down_columns.data)[place * 2 + half] =
            cast_chunk<format>([&](int e) { return widen(chunk.values[e]) * factor; });
        if (half == 0)
          down_columns.exponents[place_of_exponent(down_columns, column, block, column_blocks)] =
              static_cast<uint8_t>(exponent);
      }
    }
    __syncthreads();  // before the next tile takes this one's place
  }
}

}  // namespace

void launch_cast_row_blocks(const CastBlocks& out, const Matrix& x, const BlockOptions& options,
                            cudaStream_t stream) {
  const int64_t chunks = x.rows * parts_of(x.columns, kBlock) * 2;
  const auto grid = static_cast<unsigned>(std::clamp<int64_t>(parts_of(chunks, kThreads), 1, kMaxGrid));
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

void launch_cast_both_blocks(const CastBlocks& rows, const CastBlocks& columns, const Matrix& x,
                             const BlockOptions& options, cudaStream_t stream) {
  const int64_t tiles = parts_of(x.columns, kTileColumns) * parts_of(x.rows, kBlock);
  const auto grid = static_cast<unsigned>(std::clamp<int64_t>(tiles, 1, kMaxGrid));
  with_types(options.format, x.source, [&]<Format format, class T>(T) {
    launch_kernel(both_blocks_kernel<format, T>, grid, dim3(kThreads), stream, rows, columns,
                  static_cast<const T*>(x.data), x.rows, x.columns, options.round_up);
  });
}

}  // namespace titan::float8::cuda

// So far these have run on virtual GPUs only (docs/verified_on.md). Each kernel is one pass and memory-bound, so a
// thread reads 16 bytes at a time if the rows allow it.

#include "cuda_plugin/float8_kernels.h"

#include <cuda_fp8.h>

#include <algorithm>

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

// See [Note: magnitudes as integers] in src/float8/cpu/scales.cpp: a NaN is the largest.
template <class T>
__device__ unsigned magnitude(T x) {
  return __float_as_uint(widen(x)) & 0x7fffffffu;
}

__device__ unsigned largest_of_block(unsigned mine) {
  __shared__ unsigned of_warps[kThreads / kWarp];
  mine = __reduce_max_sync(0xffffffffu, mine);
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = mine;
  __syncthreads();
  unsigned best = threadIdx.x < kThreads / kWarp ? of_warps[threadIdx.x] : 0;
  return __reduce_max_sync(0xffffffffu, best);  // valid in the first warp
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

template <class T>
__global__ void amax_kernel(float* out, const T* x, int64_t count) {
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const unsigned best = largest_of_block(largest_of(x, count, first, int64_t{gridDim.x} * kThreads));
  if (threadIdx.x == 0) atomicMax(reinterpret_cast<unsigned*>(out), best);
}

template <class T>
__global__ void amax_of_rows_kernel(float* out, const T* x, int64_t rows, int64_t columns) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const unsigned best = largest_of_block(largest_of(x + row * columns, columns, threadIdx.x, kThreads));
    if (threadIdx.x == 0) out[row] = __uint_as_float(best);
    __syncthreads();  // the next row writes the shared values that some threads may still read
  }
}

// A thread block has kThreads columns and kRowsPerBlock rows; neighboring threads read neighboring elements.
constexpr int64_t kRowsPerBlock = 256;
template <class T>
__global__ void amax_of_columns_kernel(float* out, const T* x, int64_t rows, int64_t columns) {
  const int64_t column = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (column >= columns) return;
  for (int64_t first = blockIdx.y * kRowsPerBlock; first < rows; first += gridDim.y * kRowsPerBlock) {
    unsigned best = 0;
    for (int64_t row = first; row < min(rows, first + kRowsPerBlock); ++row)
      best = max(best, magnitude(x[row * columns + column]));
    atomicMax(reinterpret_cast<unsigned*>(out + column), best);
  }
}

__device__ float scale_for(float amax, ScaleOptions options) {
  const double held = isnan(amax) ? double{amax} : fmax(double{amax}, 1e-12);
  const auto scale = static_cast<float>(options.largest / held);
  return options.power_of_two && !isnan(scale) ? __uint_as_float(__float_as_uint(scale) & 0x7f800000u)
                                               : scale;
}

__global__ void scale_kernel(float* out, const float* amax, int64_t count, ScaleOptions options) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) out[i] = scale_for(amax[i], options);
}

// The instruction turns every NaN into the same one, but LibTorch's conversion keeps its sign.
template <Format format>
__device__ uint8_t to_float8(float x) {
  if (isnan(x)) return 0x7f | (__float_as_uint(x) >> 31 << 7);
  return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, format == Format::E4m3 ? __NV_E4M3 : __NV_E5M2);
}

template <Format format, class T>
__global__ void cast_kernel(uint8_t* out, const T* x, int64_t columns, int64_t count, CastOptions options) {
  constexpr int kSize = Pack<T>::kSize;
  const int64_t step = int64_t{gridDim.x} * kThreads, first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  // A pack within one row has one scale.
  const bool packed = reinterpret_cast<uintptr_t>(x) % sizeof(Pack<T>) == 0 &&
                      reinterpret_cast<uintptr_t>(out) % kSize == 0 && columns % kSize == 0;
  if (packed) {
    struct alignas(kSize) Bytes {
      uint8_t values[kSize];
    };
    for (int64_t i = first; i < count / kSize; i += step) {
      const Pack<T> pack = reinterpret_cast<const Pack<T>*>(x)[i];
      const float factor = options.scale[options.scale_by_row ? i * kSize / columns : 0];
      Bytes bytes;
      for (int k = 0; k < kSize; ++k) bytes.values[k] = to_float8<format>(widen(pack.values[k]) * factor);
      reinterpret_cast<Bytes*>(out)[i] = bytes;
    }
    return;
  }
  for (int64_t i = first; i < count; i += step)
    out[i] = to_float8<format>(widen(x[i]) * options.scale[options.scale_by_row ? i / columns : 0]);
}

// Tiles of 64 by 64 are transposed in shared memory, so that both sides are read and written along their
// rows. The extra columns keep the threads of a warp in different banks.
constexpr int kTile = 64;
template <Format format, class T>
__global__ void transposed_cast_kernel(uint8_t* out, const T* x, int64_t rows, int64_t columns,
                                       CastOptions options) {
  __shared__ uint8_t tile[kTile][kTile + 4];
  // Rows are along x, because a grid may have 2^31 - 1 blocks along x but only 65,535 along y.
  const int64_t first_row = int64_t{blockIdx.x} * kTile, first_column = int64_t{blockIdx.y} * kTile;
  const int inner = threadIdx.x % kTile, outer = threadIdx.x / kTile;
  const int64_t column = first_column + inner;
  if (column < columns) {
    const float factor = options.scale[options.scale_by_row ? column : 0];  // a row of the result
    for (int i = outer; i < kTile && first_row + i < rows; i += kThreads / kTile)
      tile[i][inner] = to_float8<format>(widen(x[(first_row + i) * columns + column]) * factor);
  }
  __syncthreads();
  const int64_t row = first_row + inner;
  if (row >= rows) return;
  for (int i = outer; i < kTile && first_column + i < columns; i += kThreads / kTile)
    out[(first_column + i) * rows + row] = tile[inner][i];
}

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

__global__ void delayed_scale_kernel(float* out, DelayedScale delayed, ScaleOptions options) {
  const float amax = *delayed.amax;
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

void launch_amax(float* out, const Matrix& x, cudaStream_t stream) {
  const int64_t count = x.rows * x.columns;
  with_source(x.source, [&]<class T>(T) {
    launch_kernel(amax_kernel<T>, dim3(blocks_for(count, kThreads * 32)), dim3(kThreads), stream, out,
                  static_cast<const T*>(x.data), count);
  });
}

void launch_amax_of_rows(float* out, const Matrix& x, cudaStream_t stream) {
  with_source(x.source, [&]<class T>(T) {
    launch_kernel(amax_of_rows_kernel<T>, dim3(blocks_for(x.rows, 1)), dim3(kThreads), stream, out,
                  static_cast<const T*>(x.data), x.rows, x.columns);
  });
}

void launch_amax_of_columns(float* out, const Matrix& x, cudaStream_t stream) {
  const dim3 grid(parts_of(x.columns, kThreads), blocks_for(x.rows, kRowsPerBlock));
  with_source(x.source, [&]<class T>(T) {
    launch_kernel(amax_of_columns_kernel<T>, grid, dim3(kThreads), stream, out, static_cast<const T*>(x.data),
                  x.rows, x.columns);
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

void launch_scale(float* out, const float* amax, int64_t count, const ScaleOptions& options,
                  cudaStream_t stream) {
  launch_kernel(scale_kernel, dim3(static_cast<unsigned>(parts_of(count, kThreads))), dim3(kThreads), stream,
                out, amax, count, options);
}

void launch_delayed_scale(float* out, const DelayedScale& delayed, const ScaleOptions& options,
                          cudaStream_t stream) {
  launch_kernel(delayed_scale_kernel, dim3(1), dim3(1), stream, out, delayed, options);
}

void launch_cast(uint8_t* out, const Matrix& x, const CastOptions& options, cudaStream_t stream) {
  const int64_t count = x.rows * x.columns;
  with_types(options.format, x.source, [&]<Format format, class T>(T) {
    launch_kernel(cast_kernel<format, T>, dim3(blocks_for(count, kThreads * 8)), dim3(kThreads), stream, out,
                  static_cast<const T*>(x.data), x.columns, count, options);
  });
}

void launch_transposed_cast(uint8_t* out, const Matrix& x, const CastOptions& options, cudaStream_t stream) {
  const dim3 grid(parts_of(x.rows, kTile), parts_of(x.columns, kTile));
  with_types(options.format, x.source, [&]<Format format, class T>(T) {
    launch_kernel(transposed_cast_kernel<format, T>, grid, dim3(kThreads), stream, out,
                  static_cast<const T*>(x.data), x.rows, x.columns, options);
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

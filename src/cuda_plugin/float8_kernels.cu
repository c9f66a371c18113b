// Never run yet (docs/verified_on.md). Each is one pass: bound by memory, so elements are read 16 bytes a
// thread where the rows allow that.

#include "cuda_plugin/float8_kernels.h"

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>

namespace titan::float8::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kMaxBlocks = 4096;

__device__ float widen(float x) { return x; }
__device__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

// [Note: magnitudes as integers] in src/float8/cpu/scales.cpp: a NaN wins by itself.
template <class T>
__device__ unsigned magnitude(T x) {
  return __float_as_uint(widen(x)) & 0x7fffffffu;
}

template <class T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(T);
  T values[kSize];
};

__device__ unsigned largest_of_block(unsigned mine) {
  __shared__ unsigned of_warps[kThreads / kWarp];
  mine = __reduce_max_sync(0xffffffffu, mine);
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = mine;
  __syncthreads();
  unsigned best = threadIdx.x < kThreads / kWarp ? of_warps[threadIdx.x] : 0;
  return __reduce_max_sync(0xffffffffu, best);  // whole in the first warp
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
    __syncthreads();  // the next row writes the shared values that some may still read
  }
}

// A block has kThreads columns and a stretch of rows; neighbouring threads read neighbouring elements.
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

__global__ void scale_kernel(float* out, const float* amax, int64_t count, double largest,
                             bool power_of_two) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const float largest_magnitude = amax[i];
  const double held =
      isnan(largest_magnitude) ? double{largest_magnitude} : fmax(double{largest_magnitude}, 1e-12);
  const auto scale = static_cast<float>(largest / held);
  out[i] = power_of_two && !isnan(scale) ? __uint_as_float(__float_as_uint(scale) & 0x7f800000u) : scale;
}

// The instruction makes every NaN the same one; LibTorch's conversion keeps its sign.
template <Format format>
__device__ uint8_t to_float8(float x) {
  if (isnan(x)) return 0x7f | (__float_as_uint(x) >> 31 << 7);
  return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, format == Format::E4m3 ? __NV_E4M3 : __NV_E5M2);
}

template <Format format, class T>
__global__ void cast_kernel(uint8_t* out, const T* x, int64_t columns, int64_t count, const float* scale,
                            bool scale_by_row) {
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
      const float factor = scale[scale_by_row ? i * kSize / columns : 0];
      Bytes bytes;
      for (int k = 0; k < kSize; ++k) bytes.values[k] = to_float8<format>(widen(pack.values[k]) * factor);
      reinterpret_cast<Bytes*>(out)[i] = bytes;
    }
    return;
  }
  for (int64_t i = first; i < count; i += step)
    out[i] = to_float8<format>(widen(x[i]) * scale[scale_by_row ? i / columns : 0]);
}

// Tiles of 64 by 64 through shared memory, so that both sides are read and written along their rows. The
// column behind each row keeps threads of a warp in banks of their own.
constexpr int kTile = 64;
template <Format format, class T>
__global__ void transposed_cast_kernel(uint8_t* out, const T* x, int64_t rows, int64_t columns,
                                       const float* scale, bool scale_by_column) {
  __shared__ uint8_t tile[kTile][kTile + 4];
  // Rows in x: a grid has 2^31 - 1 blocks that way, and 65,535 the other.
  const int64_t first_row = int64_t{blockIdx.x} * kTile, first_column = int64_t{blockIdx.y} * kTile;
  const int inner = threadIdx.x % kTile, outer = threadIdx.x / kTile;
  const int64_t column = first_column + inner;
  if (column < columns) {
    const float factor = scale[scale_by_column ? column : 0];
    for (int i = outer; i < kTile && first_row + i < rows; i += kThreads / kTile)
      tile[i][inner] = to_float8<format>(widen(x[(first_row + i) * columns + column]) * factor);
  }
  __syncthreads();
  const int64_t row = first_row + inner;
  if (row >= rows) return;
  for (int i = outer; i < kTile && first_column + i < columns; i += kThreads / kTile)
    out[(first_column + i) * rows + row] = tile[inner][i];
}

unsigned blocks_for(int64_t work, int64_t per_block) {
  return static_cast<unsigned>(std::clamp<int64_t>((work + per_block - 1) / per_block, 1, kMaxBlocks));
}
unsigned tiles_of(int64_t size) { return static_cast<unsigned>((size + kTile - 1) / kTile); }

template <class Launch>
void with_source(const Matrix& x, Launch launch) {
  if (x.source == Source::Float) {
    launch(static_cast<const float*>(x.data));
  } else {
    launch(static_cast<const __nv_bfloat16*>(x.data));
  }
}

}  // namespace

void launch_amax(float* out, const Matrix& x, cudaStream_t stream) {
  const int64_t count = x.rows * x.columns;
  with_source(x, [&](const auto* from) {
    amax_kernel<<<blocks_for(count, kThreads * 32), kThreads, 0, stream>>>(out, from, count);
  });
}

void launch_amax_of_rows(float* out, const Matrix& x, cudaStream_t stream) {
  with_source(x, [&](const auto* from) {
    amax_of_rows_kernel<<<blocks_for(x.rows, 1), kThreads, 0, stream>>>(out, from, x.rows, x.columns);
  });
}

void launch_amax_of_columns(float* out, const Matrix& x, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((x.columns + kThreads - 1) / kThreads),
                  blocks_for(x.rows, kRowsPerBlock));
  with_source(x, [&](const auto* from) {
    amax_of_columns_kernel<<<grid, kThreads, 0, stream>>>(out, from, x.rows, x.columns);
  });
}

void launch_scale(float* out, const float* amax, int64_t count, double largest, bool power_of_two,
                  cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
  scale_kernel<<<blocks, kThreads, 0, stream>>>(out, amax, count, largest, power_of_two);
}

void launch_cast(uint8_t* out, const Matrix& x, const CastOptions& options, cudaStream_t stream) {
  const int64_t count = x.rows * x.columns;
  with_source(x, [&](const auto* from) {
    const auto kernel = options.format == Format::E4m3
                            ? cast_kernel<Format::E4m3, std::remove_cvref_t<decltype(*from)>>
                            : cast_kernel<Format::E5m2, std::remove_cvref_t<decltype(*from)>>;
    kernel<<<blocks_for(count, kThreads * 8), kThreads, 0, stream>>>(out, from, x.columns, count,
                                                                     options.scale, options.scale_by_row);
  });
}

void launch_transposed_cast(uint8_t* out, const Matrix& x, const CastOptions& options, cudaStream_t stream) {
  const dim3 grid(tiles_of(x.rows), tiles_of(x.columns));
  with_source(x, [&](const auto* from) {
    const auto kernel = options.format == Format::E4m3
                            ? transposed_cast_kernel<Format::E4m3, std::remove_cvref_t<decltype(*from)>>
                            : transposed_cast_kernel<Format::E5m2, std::remove_cvref_t<decltype(*from)>>;
    kernel<<<grid, kThreads, 0, stream>>>(out, from, x.rows, x.columns, options.scale, options.scale_by_row);
  });
}

}  // namespace titan::float8::cuda

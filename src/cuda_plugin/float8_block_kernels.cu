// Never run yet (docs/verified_on.md). Each is one pass over what it reads.

#include "cuda_plugin/float8_kernels.h"

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>

namespace titan::float8::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kBlock = 32;
constexpr int64_t kMaxBlocks = 65535;
constexpr int kNotFinite = 255;

__device__ float as_float(float x) { return x; }
__device__ float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ unsigned magnitude_of(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// src/float8/cpu/cast.cpp, whose constants the host's compiler alone has.
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

// The instruction makes every NaN the same one; LibTorch's conversion keeps its sign.
template <Format format>
__device__ uint8_t to_byte(float x) {
  if (isnan(x)) return 0x7f | (__float_as_uint(x) >> 31 << 7);
  return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, format == Format::E4m3 ? __NV_E4M3 : __NV_E5M2);
}

// A warp a block, a lane an element. Warps of a thread block take neighbouring blocks.
template <Format format, class T>
__global__ void row_blocks_kernel(uint8_t* out, uint8_t* exponents, const T* x, int64_t rows, int64_t columns,
                                  bool round_up) {
  const int64_t blocks = (columns + kBlock - 1) / kBlock;
  const int lane = threadIdx.x % kWarp;
  const int64_t step = int64_t{gridDim.x} * (kThreads / kWarp);
  for (int64_t i = int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp; i < rows * blocks;
       i += step) {
    const int64_t row = i / blocks, column = i % blocks * kBlock + lane;
    const float value = column < columns ? as_float(x[row * columns + column]) : 0.0f;
    const int exponent = exponent_of<format>(__reduce_max_sync(0xffffffffu, magnitude_of(value)), round_up);
    out[i * kBlock + lane] = to_byte<format>(value * factor_of(exponent, round_up));
    if (lane == 0) exponents[i] = static_cast<uint8_t>(exponent);
  }
}

// A thread a block: it reads 32 elements of its column, its neighbours those of the next columns, and writes
// 32 bytes of a row.
template <Format format, class T>
__global__ void column_blocks_kernel(uint8_t* out, uint8_t* exponents, const T* x, int64_t rows,
                                     int64_t columns, bool round_up) {
  const int64_t blocks = (rows + kBlock - 1) / kBlock;
  const int64_t column = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (column >= columns) return;
  for (int64_t block = blockIdx.y; block < blocks; block += gridDim.y) {
    float values[kBlock];
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const int64_t row = block * kBlock + i;
      values[i] = row < rows ? as_float(x[row * columns + column]) : 0.0f;
      largest = max(largest, magnitude_of(values[i]));
    }
    const int exponent = exponent_of<format>(largest, round_up);
    const float factor = factor_of(exponent, round_up);
    alignas(16) uint8_t bytes[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) bytes[i] = to_byte<format>(values[i] * factor);
    const int64_t place = column * blocks + block;
    auto* to = reinterpret_cast<uint4*>(out + place * kBlock);
    to[0] = reinterpret_cast<const uint4*>(bytes)[0];
    to[1] = reinterpret_cast<const uint4*>(bytes)[1];
    exponents[place] = static_cast<uint8_t>(exponent);
  }
}

// [Note: magnitudes as integers] in src/float8/cpu/scales.cpp: a NaN wins by itself.
template <class T>
__global__ void amax_of_pieces_kernel(float* out, const AmaxPiece* pieces) {
  const AmaxPiece piece = pieces[blockIdx.x];
  const T* x = static_cast<const T*>(piece.data);
  constexpr int kSize = 16 / sizeof(T);
  const bool packed = reinterpret_cast<uintptr_t>(x) % 16 == 0;
  const int64_t packs = packed ? piece.count / kSize : 0;
  unsigned best = 0;
  for (int64_t i = threadIdx.x; i < packs; i += kThreads) {
    const uint4 pack = reinterpret_cast<const uint4*>(x)[i];
    const T* values = reinterpret_cast<const T*>(&pack);
#pragma unroll
    for (int k = 0; k < kSize; ++k) best = max(best, magnitude_of(as_float(values[k])));
  }
  for (int64_t i = packs * kSize + threadIdx.x; i < piece.count; i += kThreads)
    best = max(best, magnitude_of(as_float(x[i])));
  best = __reduce_max_sync(0xffffffffu, best);
  if (threadIdx.x % kWarp == 0) atomicMax(reinterpret_cast<unsigned*>(out + piece.tensor), best);
}

__global__ void delayed_scale_kernel(float* out, const float* amax, float* pending, const float* history,
                                     DelayedOptions options) {
  const float mine = *amax;
  if (!isfinite(mine)) {
    *out = __uint_as_float(0x7fc00000u);
    return;
  }
  if (options.records) *pending = fmaxf(*pending, mine);
  const float used = *history > 0 ? *history : mine;
  const auto scale = static_cast<float>(options.largest / fmax(double{used}, 1e-12));
  *out = options.power_of_two ? __uint_as_float(__float_as_uint(scale) & 0x7f800000u) : scale;
}

template <class Launch>
void with_type(Source source, Launch launch) {
  if (source == Source::Float) {
    launch(float{});
  } else {
    launch(__nv_bfloat16{});
  }
}

template <class Kernel4, class Kernel5>
auto of_format(Format format, Kernel4 e4m3, Kernel5 e5m2) {
  return format == Format::E4m3 ? e4m3 : e5m2;
}

}  // namespace

void launch_cast_row_blocks(uint8_t* out, uint8_t* exponents, const Matrix& x, const BlockOptions& options,
                            cudaStream_t stream) {
  const int64_t warps = x.rows * ((x.columns + kBlock - 1) / kBlock), per_block = kThreads / kWarp;
  const auto grid =
      static_cast<unsigned>(std::clamp<int64_t>((warps + per_block - 1) / per_block, 1, kMaxBlocks));
  with_type(x.source, [&]<class T>(T) {
    const auto kernel =
        of_format(options.format, row_blocks_kernel<Format::E4m3, T>, row_blocks_kernel<Format::E5m2, T>);
    kernel<<<grid, kThreads, 0, stream>>>(out, exponents, static_cast<const T*>(x.data), x.rows, x.columns,
                                          options.round_up);
  });
}

void launch_cast_column_blocks(uint8_t* out, uint8_t* exponents, const Matrix& x, const BlockOptions& options,
                               cudaStream_t stream) {
  const int64_t blocks = (x.rows + kBlock - 1) / kBlock;
  const dim3 grid(static_cast<unsigned>((x.columns + kThreads - 1) / kThreads),
                  static_cast<unsigned>(std::clamp<int64_t>(blocks, 1, kMaxBlocks)));
  with_type(x.source, [&]<class T>(T) {
    const auto kernel = of_format(options.format, column_blocks_kernel<Format::E4m3, T>,
                                  column_blocks_kernel<Format::E5m2, T>);
    kernel<<<grid, kThreads, 0, stream>>>(out, exponents, static_cast<const T*>(x.data), x.rows, x.columns,
                                          options.round_up);
  });
}

void launch_amax_of_pieces(float* out, const AmaxPiece* pieces, int64_t num_pieces, Source source,
                           cudaStream_t stream) {
  if (num_pieces == 0) return;
  with_type(source, [&]<class T>(T) {
    amax_of_pieces_kernel<T><<<static_cast<unsigned>(num_pieces), kThreads, 0, stream>>>(out, pieces);
  });
}

void launch_delayed_scale(float* out, const float* amax, float* pending, const float* largest_of_history,
                          const DelayedOptions& options, cudaStream_t stream) {
  delayed_scale_kernel<<<1, 1, 0, stream>>>(out, amax, pending, largest_of_history, options);
}

}  // namespace titan::float8::cuda

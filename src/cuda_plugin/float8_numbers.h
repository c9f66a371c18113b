#pragma once

// Shared by Float8's kernels: magnitudes of elements and of thread blocks, scales, conversions, and launches for several matrices.

#include <cuda_fp8.h>

#include <algorithm>
#include <span>

#include "cuda_plugin/float8_kernels.h"
#include "cuda_plugin/pack.h"

namespace titan::float8::cuda {

using namespace titan::cuda;

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 4096;
constexpr int64_t kMaxGrid = 65535;  // in y and z
constexpr int kMaxRowThreads = 512;

// See [Note: magnitudes as integers] in src/float8/cpu/scales.cpp: a NaN is the largest.
template <class T>
__device__ unsigned magnitude(const T& x) {
  return __float_as_uint(widen(x)) & 0x7fffffffu;
}

// Reads kAtOnce packs before it uses the first.
template <int kAtOnce, class T>
__device__ unsigned largest_of(const T* x, int64_t count, int64_t first, int64_t step) {
  unsigned best = 0;
  const bool packed = reinterpret_cast<uintptr_t>(x) % sizeof(Pack<T>) == 0;
  const int64_t packs = packed ? count / Pack<T>::kSize : 0;
  for (int64_t i = first; i < packs; i += kAtOnce * step) {
    PackBits bits[kAtOnce] = {};
    bits[0] = reinterpret_cast<const PackBits*>(x)[i];
#pragma unroll
    for (int k = 1; k < kAtOnce; ++k)
      if (i + k * step < packs) bits[k] = reinterpret_cast<const PackBits*>(x)[i + k * step];
#pragma unroll
    for (const PackBits& some : bits) {
      const Pack<T> pack = unpacked<T>(some);
#pragma unroll
      for (const T value : pack.values) best = max(best, magnitude(value));
    }
  }
  for (int64_t i = packs * Pack<T>::kSize + first; i < count; i += step) best = max(best, magnitude(x[i]));
  return best;
}

// In all threads. Static, because its shared memory is each file's own.
[[maybe_unused]] static __device__ unsigned largest_of_block(unsigned mine) {
  __shared__ unsigned of_warps[kMaxRowThreads / kWarp];
  mine = __reduce_max_sync(kAllLanes, mine);
  __syncthreads();  // all have read the values of the call before
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = mine;
  __syncthreads();
  unsigned best = of_warps[0];
  for (unsigned warp = 1; warp < blockDim.x / kWarp; ++warp) best = max(best, of_warps[warp]);
  return best;
}

// A quotient of two fp32 numbers that is rounded to double and then to fp32 is the correctly rounded one, because double has more than
// twice the bits. The double 1e-12 is between two fp32 numbers, of which 1e-12f is the lower one.
__device__ inline float scale_for(float amax, ScaleOptions options) {
  const float scale = amax <= 1e-12f ? options.scale_of_least : __fdiv_rn(options.largest, amax);
  return options.power_of_two && !isnan(scale) ? __uint_as_float(__float_as_uint(scale) & 0x7f800000u)
                                               : scale;
}

// Every thread block finds the scale, in all its threads; the first one writes it.
[[maybe_unused]] static __device__ float scale_of_matrix(const MatrixScale& from) {
  const bool writes = threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0;
  float scale = from.scale ? *from.scale : 0;
  if (!from.scale) {
    const float amax = __uint_as_float(
        largest_of_block(largest_of<1>(from.magnitudes, from.count, threadIdx.x, blockDim.x)));
    const float largest = from.history.largest ? *from.history.largest : 0;
    if (from.history.largest && !isfinite(amax)) {
      scale = __uint_as_float(0x7fc00000u);
    } else {
      scale = scale_for(largest > 0 ? largest : amax, from.options);
      if (writes && from.history.pending) *from.history.pending = fmaxf(*from.history.pending, amax);
    }
  }
  if (writes) {
    if (from.scale_out) *from.scale_out = scale;
    if (from.inverse_out) *from.inverse_out = __fdiv_rn(1.0f, scale);
  }
  return scale;
}

// Two numbers, the first one in the lower byte. CUDA's conversion turns every NaN into 0x7f, but LibTorch's keeps its sign. A device needs no
// branch for that: all callers pass products, and there a product that isn't a number is always the same one, with the sign 0.
template <Format format>
__device__ uint16_t to_float8(float first, float second) {
  constexpr __nv_fp8_interpretation_t kind = format == Format::E4m3 ? __NV_E4M3 : __NV_E5M2;
#ifdef __CUDA_ARCH__
  return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, kind);
#else
  const auto of = [](float x) -> unsigned {
    if (isnan(x)) return 0x7fu | __float_as_uint(x) >> 31 << 7;
    return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, kind);
  };
  return static_cast<uint16_t>(of(first) | of(second) << 8);
#endif
}

// A thread reads a chunk at a time, and writes it as 16 bytes.
constexpr int kChunk = 16;
template <class T>
struct Chunk {
  T values[kChunk];
};

template <class T>
__device__ bool takes_chunks(const T* x, int64_t stride) {
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

// load_chunk(from(k), left(k), whole) for each k. All are read before the first is used, so that they are on their way at once.
template <int kCount, class T, class From, class Left>
__device__ void load_chunks(Chunk<T> (&chunks)[kCount], const From& from, const Left& left, bool whole) {
  constexpr int kSize = Pack<T>::kSize, kPacks = kChunk / kSize;
  if (!whole) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) chunks[k] = load_chunk(from(k), left(k), false);
    return;
  }
  Pack<T> packs[kCount][kPacks] = {};
#pragma unroll
  for (int k = 0; k < kCount; ++k)
#pragma unroll
    for (int p = 0; p < kPacks; ++p)
      if (left(k) >= kChunk) packs[k][p] = reinterpret_cast<const Pack<T>*>(from(k))[p];
#pragma unroll
  for (int k = 0; k < kCount; ++k)
#pragma unroll
    for (int e = 0; e < kChunk; ++e) chunks[k].values[e] = packs[k][e / kSize].values[e % kSize];
}

// Calls value(e) for each of 16 elements, which returns a product.
template <Format format, class Value>
__device__ uint4 cast_chunk(Value value) {
  unsigned words[kChunk / 4] = {};
#pragma unroll
  for (int e = 0; e < kChunk; e += 2)
    words[e / 4] |= unsigned{to_float8<format>(value(e), value(e + 1))} << (e % 4 * 8);
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

template <class T>
__device__ unsigned largest_of_chunk(const Chunk<T>& chunk) {
  unsigned best = 0;
#pragma unroll
  for (int e = 0; e < kChunk; ++e) best = max(best, magnitude(chunk.values[e]));
  return best;
}

// blockIdx.z says which of the matrices a thread block works on. The grid has as many blocks as the largest needs; those that have
// nothing to do return at once.
template <class Work>
struct Batch {
  Work of[kMaxMatrices] = {};
};

// Calls launch(batch, its works) for all of them.
template <class Work, class Launch>
void in_batches(std::span<const Work> all, const Launch& launch) {
  for (size_t first = 0; first < all.size(); first += kMaxMatrices) {
    const auto some = all.subspan(first, std::min<size_t>(kMaxMatrices, all.size() - first));
    Batch<Work> batch;
    std::copy(some.begin(), some.end(), batch.of);
    launch(batch, some);
  }
}

// The largest number that `of` gives for one of them.
template <class Work, class Of>
unsigned most(std::span<const Work> works, const Of& of) {
  int64_t result = 0;
  for (const Work& work : works) result = std::max<int64_t>(result, of(work));
  return static_cast<unsigned>(result);
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

inline int64_t blocks_for(int64_t work, int64_t per_block) {
  return std::clamp<int64_t>(parts_of(work, per_block), 1, kMaxBlocks);
}

constexpr int64_t kMaxParts = 256;  // a column's

}  // namespace titan::float8::cuda

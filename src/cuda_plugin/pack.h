#pragma once

// Elements of fp32 or bf16 tensors in kernels, which read and write 16 bytes of them at a time.

#include <cuda_bf16.h>
#include <vector_types.h>

#include <cstdint>

#include "cuda_plugin/source.h"

namespace titan::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// By reference, and the bits by a member function: g++ doesn't instrument the read of an object of a class that is passed by value, so virtual
// GPUs wouldn't see it.
__device__ inline float widen(const float& x) { return x; }
__device__ inline float widen(const __nv_bfloat16& x) {
  const __nv_bfloat16_raw bits = x;
  return __bfloat162float(bits);
}

template <class T>
__device__ T narrow(float x) {
  if constexpr (sizeof(T) == sizeof(float))
    return x;
  else
    return __float2bfloat16(x);
}

template <class T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(T);
  T values[kSize];
};

/// A pack as it was read. Elements would be taken out of it at once, which waits for the read; bits aren't until they are unpacked.
using PackBits = uint4;

template <class T>
__device__ Pack<T> unpacked(const PackBits& bits) {
  return __builtin_bit_cast(Pack<T>, bits);
}

inline int64_t parts_of(int64_t size, int64_t part) { return (size + part - 1) / part; }

/// Calls launch(T{}).
template <class Launch>
void with_source(Source source, Launch launch) {
  if (source == Source::Float)
    launch(float{});
  else
    launch(__nv_bfloat16{});
}

}  // namespace titan::cuda

#pragma once

// CUDA's device code for the host: a kernel compiled as C++ with this header runs on the virtual GPU. Blocks run one after
// another, and the threads of a block as fibers, which change at barriers and at operations of a warp.

#include <cuda_runtime_api.h>
#include <math.h>

#include <array>
#include <bit>
#include <cstdint>
#include <functional>

namespace virtual_gpu::simt {

/// Where the thread that runs now is.
struct Place {
  uint3 thread, block;
  dim3 block_size, grid_size;
};
extern Place place;

constexpr int warp_size = 32;

/// Waits until all threads of the block that haven't returned are here.
void wait_for_block();

/// Waits for the lanes of the warp in `mask`, which all pass a value; returns the values by lane. Lanes that have returned,
/// and others that aren't in the mask, have 0.
std::array<uint64_t, warp_size> exchange(unsigned mask, uint64_t value);

struct Kernel {
  const char* name = nullptr;
  dim3 grid, block;
  std::function<void()> run;  ///< called once per thread
};
/// Queues a kernel on the stream.
void launch(Kernel kernel, cudaStream_t stream);

/// The code of a kernel begins: from here on, this thread of the block is watched; see accesses.h.
void enter_kernel();

/// The calling thread changes these bytes, as no other can at the same moment.
void change(const void* address, size_t bytes);

template <class T>
uint64_t to_bits(T value) {
  if constexpr (sizeof(T) == 8)
    return std::bit_cast<uint64_t>(value);
  else
    return std::bit_cast<uint32_t>(value);
}
template <class T>
T from_bits(uint64_t bits) {
  if constexpr (sizeof(T) == 8)
    return std::bit_cast<T>(bits);
  else
    return std::bit_cast<T>(static_cast<uint32_t>(bits));
}

template <class T, class Combine>
T reduce(unsigned mask, T value, Combine combine) {
  const auto values = exchange(mask, to_bits(value));
  for (int lane = 0; lane < warp_size; ++lane)
    if (mask >> lane & 1) value = combine(value, from_bits<T>(values[static_cast<size_t>(lane)]));
  return value;
}

}  // namespace virtual_gpu::simt

// accesses.cpp knows static variables of functions as shared ones.
#undef __shared__
#define __shared__ static

#undef __launch_bounds__
#define __launch_bounds__(...)
#define threadIdx (::virtual_gpu::simt::place.thread)
#define blockIdx (::virtual_gpu::simt::place.block)
#define blockDim (::virtual_gpu::simt::place.block_size)
#define gridDim (::virtual_gpu::simt::place.grid_size)

inline void __syncthreads() { ::virtual_gpu::simt::wait_for_block(); }

template <class T>
T max(T a, T b) {
  return a > b ? a : b;
}
template <class T>
T min(T a, T b) {
  return a < b ? a : b;
}

inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }

inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  return ::virtual_gpu::simt::reduce(mask, value, [](unsigned a, unsigned b) { return max(a, b); });
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
  const auto values = ::virtual_gpu::simt::exchange(mask, ::virtual_gpu::simt::to_bits(value));
  const auto lane = threadIdx.x % ::virtual_gpu::simt::warp_size;
  return ::virtual_gpu::simt::from_bits<T>(values[lane ^ static_cast<unsigned>(lane_mask)]);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta) {
  const auto values = ::virtual_gpu::simt::exchange(mask, ::virtual_gpu::simt::to_bits(value));
  const auto from = threadIdx.x % ::virtual_gpu::simt::warp_size + delta;
  return from < ::virtual_gpu::simt::warp_size ? ::virtual_gpu::simt::from_bits<T>(values[from]) : value;
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const auto values = ::virtual_gpu::simt::exchange(mask, predicate != 0);
  unsigned result = 0;
  for (unsigned lane = 0; lane < values.size(); ++lane) result |= static_cast<unsigned>(values[lane]) << lane;
  return result;
}

// One thread runs at a time. These accesses aren't noted one by one.
template <class T>
[[gnu::no_sanitize("thread")]] T atomicMax(T* address, T value) {
  ::virtual_gpu::simt::change(address, sizeof(T));
  const T old = *address;
  if (value > old) *address = value;
  return old;
}
template <class T>
[[gnu::no_sanitize("thread")]] T atomicAdd(T* address, T value) {
  ::virtual_gpu::simt::change(address, sizeof(T));
  const T old = *address;
  *address += value;
  return old;
}

#pragma once

// CUDA's device code for the host: a kernel compiled as C++ with this header runs on the virtual GPU. Blocks run one after
// another, and the threads of a block as fibers, which change at barriers and at operations of a warp.

#include <cuda_runtime_api.h>
#include <math.h>
#include <string.h>

#include <array>
#include <bit>
#include <cstdint>
#include <functional>
#include <source_location>

// In kernels. -fsanitize=thread notes assignments only; these note their bytes, too (accesses.cpp).
#ifdef __SANITIZE_THREAD__
extern "C" {
void* memcpy(void* to, const void* from, size_t bytes) noexcept asm("virtual_gpu_memcpy");
void* memmove(void* to, const void* from, size_t bytes) noexcept asm("virtual_gpu_memmove");
void* memset(void* to, int value, size_t bytes) noexcept asm("virtual_gpu_memset");
}
#endif

namespace virtual_gpu::simt {

/// Where the thread that runs now is.
struct Place {
  uint3 thread, block;
  dim3 block_size, grid_size;
};
extern Place place;

constexpr int warp_size = 32;

/// A barrier or an operation of a warp, by its place in the kernel's source: threads that wait at different ones don't meet.
using Site = std::source_location;

/// Waits until all threads of the block that haven't returned are here.
void wait_for_block(const Site& site);

struct Exchanged {
  std::array<uint64_t, warp_size> values{};  ///< by lane; 0 unless the lane has passed one
  unsigned lanes = 0;                        ///< those that have
  /// Ends the program if the lane has passed none, because CUDA's result is undefined.
  uint64_t of(unsigned lane) const;
};
/// Waits for the lanes of the warp in `mask` that haven't returned, which all pass a value.
Exchanged exchange(unsigned mask, uint64_t value, const Site& site);

struct Kernel {
  const char* name = nullptr;
  const void* code = nullptr;  ///< differs for each instance of a template
  dim3 grid, block;
  std::function<void()> run;  ///< called once per thread
};
/// Queues a kernel on the stream, unless check_launch fails.
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
T reduce(unsigned mask, T value, Combine combine, const Site& site) {
  const Exchanged all = exchange(mask, to_bits(value), site);
  for (unsigned lane = 0; lane < warp_size; ++lane)
    if (all.lanes >> lane & 1) value = combine(value, from_bits<T>(all.of(lane)));
  return value;
}

}  // namespace virtual_gpu::simt

// accesses.cpp knows static variables of functions as shared ones. They are at most 48 KiB, so a gap follows each, and an access beyond
// the end of one meets no other.
#undef __shared__
#define __shared__ alignas(64 << 10) static

#undef __launch_bounds__
#define __launch_bounds__(...)
#define threadIdx (::virtual_gpu::simt::place.thread)
#define blockIdx (::virtual_gpu::simt::place.block)
#define blockDim (::virtual_gpu::simt::place.block_size)
#define gridDim (::virtual_gpu::simt::place.grid_size)

inline void __syncthreads(::virtual_gpu::simt::Site site = ::virtual_gpu::simt::Site::current()) {
  ::virtual_gpu::simt::wait_for_block(site);
}

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

inline unsigned __reduce_max_sync(unsigned mask, unsigned value,
                                  ::virtual_gpu::simt::Site site = ::virtual_gpu::simt::Site::current()) {
  return ::virtual_gpu::simt::reduce(
      mask, value, [](unsigned a, unsigned b) { return max(a, b); }, site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask,
                  ::virtual_gpu::simt::Site site = ::virtual_gpu::simt::Site::current()) {
  const auto all = ::virtual_gpu::simt::exchange(mask, ::virtual_gpu::simt::to_bits(value), site);
  const auto lane = threadIdx.x % ::virtual_gpu::simt::warp_size;
  return ::virtual_gpu::simt::from_bits<T>(all.of(lane ^ static_cast<unsigned>(lane_mask)));
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta,
                   ::virtual_gpu::simt::Site site = ::virtual_gpu::simt::Site::current()) {
  const auto all = ::virtual_gpu::simt::exchange(mask, ::virtual_gpu::simt::to_bits(value), site);
  const auto from = threadIdx.x % ::virtual_gpu::simt::warp_size + delta;
  return from < ::virtual_gpu::simt::warp_size ? ::virtual_gpu::simt::from_bits<T>(all.of(from)) : value;
}
inline unsigned __ballot_sync(unsigned mask, int predicate,
                              ::virtual_gpu::simt::Site site = ::virtual_gpu::simt::Site::current()) {
  const auto values = ::virtual_gpu::simt::exchange(mask, predicate != 0, site).values;
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

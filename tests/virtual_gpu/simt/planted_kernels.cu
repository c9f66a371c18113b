// Kernels with planted faults, and their sound counterparts. virtual_gpu.self launches them, and checks that the faults are found.

#include <string_view>

#include "cuda_plugin/float8_numbers.h"
#include "cuda_plugin/launch.h"

namespace {

constexpr unsigned kThreads = 64;

// Each block's values in reverse order.
__global__ void sound_kernel(float* out, const float* in) {
  __shared__ float values[kThreads];
  values[threadIdx.x] = in[blockIdx.x * kThreads + threadIdx.x];
  __syncthreads();
  const float mirrored = values[kThreads - 1 - threadIdx.x];
  out[blockIdx.x * kThreads + threadIdx.x] = mirrored;
}

__global__ void missing_barrier_kernel(float* out, const float* in) {
  __shared__ float values[kThreads];
  values[threadIdx.x] = 0;
  __syncthreads();
  values[threadIdx.x] = in[blockIdx.x * kThreads + threadIdx.x];
  out[blockIdx.x * kThreads + threadIdx.x] = values[kThreads - 1 - threadIdx.x];
}

// The second round's writes meet the first round's reads.
__global__ void missing_second_barrier_kernel(float* out, const float* in) {
  __shared__ float values[kThreads];
  for (int round = 0; round < 2; ++round) {
    values[threadIdx.x] = in[blockIdx.x * kThreads + threadIdx.x];
    __syncthreads();
    out[blockIdx.x * kThreads + threadIdx.x] = values[kThreads - 1 - threadIdx.x];
  }
}

__global__ void blocks_share_a_result_kernel(float* out, const float* in) {
  out[threadIdx.x] = in[blockIdx.x];
}

__global__ void atomic_sum_kernel(float* out, const float* in) {
  atomicAdd(out, in[blockIdx.x * kThreads + threadIdx.x]);
}

__global__ void unwritten_shared_kernel(float* out, const float* in) {
  __shared__ float values[kThreads];
  if (threadIdx.x > 0) values[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = values[threadIdx.x];
}

__global__ void next_shared_kernel(float* out, const float* in) {
  __shared__ float values[kThreads];
  float* const next = values + 1;
  next[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = in[threadIdx.x];
}

// From the lower of two arrays into the upper one, if they are adjacent.
__global__ void array_after_array_kernel(float* out, const float* in) {
  __shared__ float first[kThreads], second[kThreads];
  first[threadIdx.x] = second[threadIdx.x] = in[threadIdx.x];
  const bool is_first_lower = reinterpret_cast<uintptr_t>(first) < reinterpret_cast<uintptr_t>(second);
  float* const lower = is_first_lower ? first : second;
  out[threadIdx.x] = first[threadIdx.x] + second[threadIdx.x];
  if (threadIdx.x == 0) lower[kThreads + 1] = in[0];
}

// Two threads' copies overlap. (The compiler makes assignments of shorter ones.)
__global__ void copies_overlap_kernel(float* out, const float* in) {
  if (threadIdx.x < 2) memcpy(out + threadIdx.x, in, 8 * sizeof *out);
}
__global__ void fills_overlap_kernel(float* out, const float* in) {
  if (threadIdx.x < 2 && in[0] != 0) memset(out + threadIdx.x, 0, 8 * sizeof *out);
}
__global__ void copy_too_far_kernel(float* out, const float* in) {
  if (threadIdx.x == kThreads - 7) memcpy(out, in + threadIdx.x, 8 * sizeof *out);
}

// Into the memory of the library's own variables.
__global__ void far_shared_kernel(float* out, const float* in) {
  __shared__ float values[kThreads];
  float* const place = reinterpret_cast<float*>(&virtual_gpu::simt::place);
  const auto distance = place - values;
  if (threadIdx.x == 0) values[distance] = in[0];
  out[threadIdx.x] = in[threadIdx.x];
}

// For each of 32 rounds, which of the two warps came first.
__global__ void order_of_warps_kernel(float* out, const float* in) {
  for (unsigned round = 0; round < kThreads / 2; ++round) {
    __syncthreads();
    if (threadIdx.x % virtual_gpu::simt::warp_size == 0 && atomicAdd(&out[round], 1.0f) == 0.0f)
      atomicAdd(&out[kThreads / 2 + round], threadIdx.x == 0 ? in[round] : 0.0f);
  }
}

// In a template's shared memory, too.
template <class T>
__global__ void unwritten_in_template_kernel(T* out, const T* in) {
  __shared__ T values[kThreads];
  if (threadIdx.x > 0) values[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = values[threadIdx.x];
}

// Each half of a warp adds up its 16 values.
__global__ void half_warps_kernel(float* out, const float* in) {
  const unsigned mask = 0xffffu << (threadIdx.x % 32 / 16 * 16);
  float sum = in[threadIdx.x];
  for (int lanes = 8; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(mask, sum, lanes);
  out[threadIdx.x] = sum;
}

__global__ void diverged_barriers_kernel(float* out, const float* in) {
  if (threadIdx.x < kThreads / 2)
    __syncthreads();
  else
    __syncthreads();
  out[threadIdx.x] = in[threadIdx.x];
}

__global__ void diverged_warp_kernel(float* out, const float* in) {
  if (threadIdx.x % 2 == 0)
    out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, in[threadIdx.x], 2);
  else
    out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, in[threadIdx.x], 2);
}

__global__ void lane_outside_mask_kernel(float* out, const float* in) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_xor_sync(0xffffu, in[threadIdx.x], 16);
}

// More calls than the stack of a thread has room for.
__device__ float descend(float x, int depth) { return depth == 0 ? x : descend(x, depth - 1) + 1; }
__global__ void deep_kernel(float* out, const float* in) {
  out[threadIdx.x] = descend(in[threadIdx.x], 100'000);
}

__global__ void one_too_far_kernel(float* out, const float* in) { out[threadIdx.x] = in[threadIdx.x + 1]; }

// The magnitude of an element of `in` as bf16, which is the argument of a function that isn't inlined.
__device__ float magnitude_of(const float* in, unsigned i) {
  auto* volatile magnitude = titan::float8::cuda::magnitude<__nv_bfloat16>;
  return __uint_as_float(magnitude(reinterpret_cast<const __nv_bfloat16*>(in)[i]));
}
__global__ void bf16_kernel(float* out, const float* in) { out[threadIdx.x] = magnitude_of(in, threadIdx.x); }
__global__ void bf16_too_far_kernel(float* out, const float* in) {
  out[threadIdx.x] = magnitude_of(in, threadIdx.x + kThreads + 1);
}

}  // namespace

extern "C" void virtual_gpu_launch_planted(const char* name, float* out, const float* in, unsigned num_blocks,
                                           cudaStream_t stream) {
#define LAUNCH(kernel)                   \
  if (std::string_view(name) == #kernel) \
  titan::launch_kernel(kernel, dim3(num_blocks), dim3(kThreads), stream, out, in)
  LAUNCH(sound_kernel);
  LAUNCH(missing_barrier_kernel);
  LAUNCH(missing_second_barrier_kernel);
  LAUNCH(blocks_share_a_result_kernel);
  LAUNCH(atomic_sum_kernel);
  LAUNCH(unwritten_shared_kernel);
  LAUNCH(next_shared_kernel);
  LAUNCH(array_after_array_kernel);
  LAUNCH(copies_overlap_kernel);
  LAUNCH(fills_overlap_kernel);
  LAUNCH(copy_too_far_kernel);
  LAUNCH(far_shared_kernel);
  LAUNCH(unwritten_in_template_kernel<float>);
  LAUNCH(order_of_warps_kernel);
  LAUNCH(half_warps_kernel);
  LAUNCH(diverged_barriers_kernel);
  LAUNCH(diverged_warp_kernel);
  LAUNCH(lane_outside_mask_kernel);
  LAUNCH(deep_kernel);
  LAUNCH(one_too_far_kernel);
  LAUNCH(bf16_kernel);
  LAUNCH(bf16_too_far_kernel);
#undef LAUNCH
}

// Kernels with planted faults, and their sound counterparts. virtual_gpu.self launches them, and checks that the faults are found.

#include <string_view>

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

__global__ void one_too_far_kernel(float* out, const float* in) { out[threadIdx.x] = in[threadIdx.x + 1]; }

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
  LAUNCH(one_too_far_kernel);
#undef LAUNCH
}

#pragma once

// Shared by the tests of the virtual GPU itself, which run under scripts/virtual_gpus.sh.

#include <dlfcn.h>

#include <cstdint>

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

namespace virtual_gpu_test {

using at::Tensor;
using c10::cuda::CUDAStreamGuard;

inline const at::TensorOptions on_gpu = at::TensorOptions().device(at::kCUDA);
inline const at::TensorOptions pinned = at::TensorOptions().pinned_memory(true);

/// One that a preloaded library has for tests.
template <class Function>
Function* function(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

/// Waits until all that is queued has run.
inline int num_races() { return function<int()>("virtual_gpu_num_races")(); }
inline int num_unwritten_reads() { return function<int()>("virtual_gpu_num_unwritten_reads")(); }

inline uint64_t count(const char* field, const char* name, const char* module = nullptr) {
  return function<uint64_t(const char*, const char*, const char*)>("virtual_gpu_count")(field, module, name);
}
inline void start_counting() { function<void()>("virtual_gpu_start_counting")(); }

/// Launches a kernel of simt/planted_kernels.cu on the current stream, for out[64 * num_blocks].
inline void launch_planted(const char* kernel, const Tensor& out, const Tensor& in, unsigned num_blocks) {
  using Launch = void(const char*, float*, const float*, unsigned, cudaStream_t);
  function<Launch>("virtual_gpu_launch_planted")(kernel, out.mutable_data_ptr<float>(),
                                                 in.const_data_ptr<float>(), num_blocks,
                                                 at::cuda::getCurrentCUDAStream());
}

class VirtualGpu : public testing::Test {
 protected:
  void SetUp() override {
    at::ones({1}, on_gpu);  // LibTorch makes its device
    c10::cuda::device_synchronize();
    races_before_ = num_races();
  }
  int new_races() const { return num_races() - races_before_; }

  at::cuda::CUDAStream main_ = at::cuda::getDefaultCUDAStream();
  at::cuda::CUDAStream side_ = at::cuda::getStreamFromPool();
  at::cuda::CUDAStream other_ = at::cuda::getStreamFromPool();

 private:
  int races_before_ = 0;
};
using VirtualGpuDeathTest = VirtualGpu;

}  // namespace virtual_gpu_test

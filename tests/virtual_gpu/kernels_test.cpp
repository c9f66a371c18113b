// Kernels of LibTitan (simt/planted_kernels.cu): races and accesses that are found, bytes that are counted, and kernels without a host version.

#include <cstdlib>

#include <ATen/cuda/CUDAEvent.h>
#include <cuda_runtime_api.h>

#include "virtual_gpu_test.h"

extern "C" void __cudaRegisterFunction(void**, const char* stub, char*, const char* name, int, uint3*, uint3*,
                                       dim3*, dim3*, int*);

namespace virtual_gpu_test {
namespace {

TEST_F(VirtualGpu, FindsAMissingWaitForAKernel) {
  const Tensor in = at::ones({128}, on_gpu), out = at::zeros({128}, on_gpu);
  c10::cuda::device_synchronize();
  const auto use_on_side = [&](bool waits) {
    launch_planted("sound_kernel", out, in, 2);
    at::cuda::CUDAEvent written;
    written.record();
    if (waits) written.block(side_);
    const CUDAStreamGuard guard(side_);
    const Tensor read = out + 1;
    c10::cuda::device_synchronize();
  };
  use_on_side(true);
  EXPECT_EQ(new_races(), 0);
  use_on_side(false);
  EXPECT_EQ(new_races(), 1);
}

TEST_F(VirtualGpu, CountsTheBytesOfAKernel) {
  const Tensor in = at::ones({128}, on_gpu), out = at::zeros({128}, on_gpu);
  start_counting();
  launch_planted("sound_kernel", out, in, 2);
  EXPECT_EQ(count("bytes_read", "sound_kernel"), 512u);
  EXPECT_EQ(count("bytes_written", "sound_kernel"), 512u);
  EXPECT_EQ(count("bytes_requested", "sound_kernel"), 1024u);
  launch_planted("blocks_share_a_result_kernel", out, in, 1);
  EXPECT_EQ(count("bytes_read", "blocks_share_a_result_kernel"), 4u);
  EXPECT_EQ(count("bytes_written", "blocks_share_a_result_kernel"), 256u);
  EXPECT_EQ(count("bytes_requested", "blocks_share_a_result_kernel"), 512u) << "each thread reads the same";
  launch_planted("bf16_kernel", out, in, 1);
  EXPECT_EQ(count("bytes_read", "bf16_kernel"), 128u);
  EXPECT_EQ(count("bytes_requested", "bf16_kernel"), 384u);
}

TEST_F(VirtualGpu, FindsRacesWithinAKernel) {
  const Tensor in = at::ones({128}, on_gpu), out = at::zeros({128}, on_gpu);
  const auto races_in = [&](const char* kernel) {
    const int before = new_races();
    launch_planted(kernel, out, in, 2);
    return new_races() - before;
  };
  EXPECT_EQ(races_in("sound_kernel"), 0);
  EXPECT_EQ(races_in("atomic_sum_kernel"), 0);
  EXPECT_EQ(races_in("missing_barrier_kernel"), 1);
  EXPECT_EQ(races_in("missing_second_barrier_kernel"), 1);
  EXPECT_EQ(races_in("blocks_share_a_result_kernel"), 1);
  EXPECT_EQ(races_in("copies_overlap_kernel"), 1);
  EXPECT_EQ(races_in("fills_overlap_kernel"), 1);
}

TEST_F(VirtualGpuDeathTest, AccessesThatAKernelMustNotMakeEndTheProgram) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const Tensor in = at::ones({64}, on_gpu), out = at::zeros({64}, on_gpu);
  const auto run = [&](const char* kernel) {
    launch_planted(kernel, out, in, 1);
    c10::cuda::device_synchronize();
  };
  EXPECT_DEATH(
      run("one_too_far_kernel"),
      "one_too_far_kernel: thread \\(63, 0, 0\\) of block \\(0, 0, 0\\) reads 4 bytes at 0x[0-9a-f]+, "
      "outside any allocation");
  EXPECT_DEATH(run("bf16_too_far_kernel"),
               "thread \\(63, 0, 0\\) .* reads 2 bytes at .*, outside any allocation");
  EXPECT_DEATH(run("copy_too_far_kernel"),
               "thread \\(57, 0, 0\\) .* reads 32 bytes at .*, outside any allocation");
  EXPECT_DEATH(run("array_after_array_kernel"),
               "thread \\(0, 0, 0\\) .* writes 4 bytes at .*, outside any variable");
  for (const char* kernel : {"unwritten_shared_kernel", "unwritten_in_template_kernel<float>"})
    EXPECT_DEATH(
        run(kernel),
        "thread \\(0, 0, 0\\) of block \\(0, 0, 0\\) reads 4 bytes at 0x[0-9a-f]+, in shared memory, "
        "which nothing has written");
  EXPECT_DEATH(run("far_shared_kernel"),
               "thread \\(0, 0, 0\\) .* writes 4 bytes at .*in a variable that isn't shared memory");
  EXPECT_DEATH(run("next_shared_kernel"),
               "thread \\(63, 0, 0\\) .* writes 4 bytes at .*, (outside any variable|in shared memory of "
               "another kernel)");
}

cudaError_t launch_named(const char& stub, const char* mangled_name) {
  __cudaRegisterFunction(nullptr, &stub, nullptr, mangled_name, -1, nullptr, nullptr, nullptr, nullptr,
                         nullptr);
  return cudaLaunchKernel(&stub, 1, 1, nullptr, 0, nullptr);
}

// In memory-only mode, LibTorch's may be missing.
TEST_F(VirtualGpuDeathTest, KernelsWithoutAHostVersionEndTheProgramWithTheirNames) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  static constexpr char of_titan = 0, of_libtorch = 0;
  EXPECT_DEATH(launch_named(of_titan, "_ZN5titan12_GLOBAL__N_114missing_kernelEPf"),
               "the kernel titan::\\(anonymous namespace\\)::missing_kernel\\(float\\*\\) is not supported");
  if (std::getenv("VIRTUAL_GPU_MEMORY_ONLY"))
    EXPECT_EQ(launch_named(of_libtorch, "_ZN2at6native14missing_kernelEPf"), cudaSuccess);
  else
    EXPECT_DEATH(launch_named(of_libtorch, "_ZN2at6native14missing_kernelEPf"), "at::native::missing_kernel");
}

}  // namespace
}  // namespace virtual_gpu_test

// Faults that a real GPU, driver or library answers with an error or with undefined behavior: planted, and found. Runs under
// scripts/virtual_gpus.sh.

#include <dlfcn.h>

#include <csignal>
#include <cstring>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

namespace {

using at::Tensor;

const at::TensorOptions on_gpu = at::TensorOptions().device(at::kCUDA);

template <class Function>
Function* function(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}
int num_races() { return function<int()>("virtual_gpu_num_races")(); }

void launch_planted(const char* kernel, const Tensor& out, const Tensor& in, unsigned num_blocks = 1) {
  using Launch = void(const char*, float*, const float*, unsigned, cudaStream_t);
  function<Launch>("virtual_gpu_launch_planted")(kernel, out.mutable_data_ptr<float>(),
                                                 in.const_data_ptr<float>(), num_blocks,
                                                 at::cuda::getCurrentCUDAStream());
}

cudaStream_t new_stream() {
  cudaStream_t stream = nullptr;
  EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  return stream;
}

class Faults : public testing::Test {
 protected:
  void SetUp() override {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    at::ones({1}, on_gpu);  // LibTorch makes its device
    c10::cuda::device_synchronize();
  }
};
using FaultsDeathTest = Faults;

// A graph's lanes keep their numbers from launch to launch.
TEST_F(Faults, NewStreamsAfterLaunchesOfAGraphHaveNumbersOfTheirOwn) {
  const Tensor x = at::ones({1000}, on_gpu);
  const auto origin = at::cuda::getStreamFromPool();
  c10::cuda::device_synchronize();
  const int before = num_races();
  {
    const c10::cuda::CUDAStreamGuard guard(origin);
    at::cuda::CUDAGraph graph;
    graph.capture_begin();
    x.add_(1);
    graph.capture_end();
    for (int launch = 0; launch < 3; ++launch) graph.replay();
    c10::cuda::device_synchronize();
    cudaStream_t const first = new_stream(), second = new_stream();
    for (cudaStream_t stream : {first, second})
      EXPECT_EQ(cudaMemsetAsync(x.mutable_data_ptr(), 0, 4000, stream), cudaSuccess);
    EXPECT_EQ(num_races() - before, 1);
    c10::cuda::device_synchronize();
    for (cudaStream_t stream : {first, second}) EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  }
  // The destroyed graph's number is that of a new stream.
  unsigned long long number = 0, next = 0;
  cudaStream_t const streams[] = {new_stream(), new_stream(), new_stream(), new_stream()};
  for (cudaStream_t stream : streams) {
    EXPECT_EQ(cudaStreamGetId(stream, &next), cudaSuccess);
    EXPECT_NE(std::exchange(number, next), next);
  }
  for (cudaStream_t stream : streams) EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

TEST_F(Faults, LaunchesBeyondCudasLimitsFail) {
  const auto launch = [](dim3 grid, dim3 block) {
    static constexpr char stub = 0;
    const cudaError_t error = cudaLaunchKernel(&stub, grid, block, nullptr, 0, nullptr);
    EXPECT_EQ(cudaGetLastError(), error);
    return error;
  };
  for (const auto& [grid, block] : std::initializer_list<std::pair<dim3, dim3>>{{{0}, {32}},
                                                                                {{1, 0}, {32}},
                                                                                {{1u << 31}, {32}},
                                                                                {{1, 65'536}, {32}},
                                                                                {{1, 1, 65'536}, {32}},
                                                                                {{1}, {0}},
                                                                                {{1}, {1025}},
                                                                                {{1}, {513, 2}},
                                                                                {{1}, {1, 1, 65}}})
    EXPECT_EQ(launch(grid, block), cudaErrorInvalidConfiguration);
  const Tensor in = at::ones({64}, on_gpu), out = at::zeros({64}, on_gpu);
  launch_planted("sound_kernel", out, in, 0);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
  launch_planted("sound_kernel", out, in, 1);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_TRUE(out.equal(in));
}

TEST_F(FaultsDeathTest, OperationsBeyondAnAllocationsEndEndTheProgram) {
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, 256), cudaSuccess);
  EXPECT_EQ(cudaMemset(static_cast<char*>(memory) + 56, 0, 200), cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_DEATH(
      {
        cudaMemset(memory, 0, 1 << 20);
        cudaDeviceSynchronize();
      },
      "cudaMemsetAsync writes 1048576 bytes at .*, the last 1048320 of them outside the allocation of 256");
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
  const Tensor x = at::ones({10}, on_gpu), y = at::ones({1000}, on_gpu);  // parts of a larger block
  EXPECT_DEATH(
      {
        cudaMemcpyAsync(y.mutable_data_ptr(), x.const_data_ptr(), 44, cudaMemcpyDeviceToDevice, nullptr);
        cudaDeviceSynchronize();
      },
      "cudaMemcpyAsync reads 44 bytes at .*, the last 4 of them outside the allocation of 40");
}

TEST_F(Faults, AFreeIsAWaitOfTheHost) {
  const auto count = [](const char* call) {
    return function<uint64_t(const char*, const char*, const char*)>("virtual_gpu_count")("host_waits",
                                                                                          nullptr, call);
  };
  void *memory = nullptr, *pinned = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, 256), cudaSuccess);
  ASSERT_EQ(cudaMallocHost(&pinned, 256), cudaSuccess);
  function<void()>("virtual_gpu_start_counting")();
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
  EXPECT_EQ(cudaFree(nullptr), cudaSuccess) << "waits for nothing";
  EXPECT_EQ(count("cudaFree"), 1u);
  EXPECT_EQ(cudaFreeHost(pinned), cudaSuccess);
  EXPECT_EQ(count("cudaFreeHost"), 1u);
}

TEST_F(Faults, EventsWithoutTimesHaveNone) {
  cudaEvent_t timed = nullptr, other = nullptr, untimed = nullptr;
  ASSERT_EQ(cudaEventCreate(&timed), cudaSuccess);
  ASSERT_EQ(cudaEventCreateWithFlags(&other, cudaEventBlockingSync), cudaSuccess);
  ASSERT_EQ(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming), cudaSuccess);
  for (cudaEvent_t event : {timed, other, untimed}) ASSERT_EQ(cudaEventRecord(event), cudaSuccess);
  c10::cuda::device_synchronize();
  float ms = -1;
  EXPECT_EQ(cudaEventElapsedTime(&ms, timed, other), cudaSuccess);
  EXPECT_GE(ms, 0);
  EXPECT_EQ(cudaEventElapsedTime(&ms, timed, untimed), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaEventElapsedTime(&ms, untimed, timed), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
  for (cudaEvent_t event : {timed, other, untimed}) EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
}

// ---- barriers of kernels

TEST_F(FaultsDeathTest, ThreadsThatWaitAtDifferentBarriersEndTheProgram) {
  const Tensor in = at::ones({64}, on_gpu), out = at::zeros({64}, on_gpu);
  const auto run = [&](const char* kernel) {
    launch_planted(kernel, out, in);
    c10::cuda::device_synchronize();
  };
  run("half_warps_kernel");
  EXPECT_TRUE(out.eq(16).all().item<bool>());
  EXPECT_DEATH(run("diverged_barriers_kernel"),
               "wait for others that never come .*Thread 0 at .*planted_kernels.cu:[0-9]+, thread 32 at ");
  EXPECT_DEATH(run("diverged_warp_kernel"), "Thread 0 at .*planted_kernels.cu:[0-9]+, thread 1 at ");
  EXPECT_DEATH(run("lane_outside_mask_kernel"), "reads lane 16 of a warp operation without it");
  EXPECT_EXIT(run("deep_kernel"), testing::KilledBySignal(SIGSEGV), "");
}

}  // namespace

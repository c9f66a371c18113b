// Faults that a real GPU, driver or library answers with an error or with undefined behavior: planted, and found. Runs under
// scripts/virtual_gpus.sh.

#include <csignal>
#include <utility>

#include <ATen/cuda/CUDAGraph.h>
#include <ATen/cuda/MemPool.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include "virtual_gpu_test.h"

namespace virtual_gpu_test {
namespace {

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
    const CUDAStreamGuard guard(origin);
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
  void *memory = nullptr, *of_host = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, 256), cudaSuccess);
  ASSERT_EQ(cudaMallocHost(&of_host, 256), cudaSuccess);
  start_counting();
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
  EXPECT_EQ(cudaFree(nullptr), cudaSuccess) << "waits for nothing";
  EXPECT_EQ(count("host_waits", "cudaFree"), 1u);
  EXPECT_EQ(cudaFreeHost(of_host), cudaSuccess);
  EXPECT_EQ(count("host_waits", "cudaFreeHost"), 1u);
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

// ---- what LibTorch's kernels for GPUs refuse, or return in a form of their own

TEST_F(Faults, AttentionRefusesArgumentsThatItWouldIgnore) {
  const Tensor x = at::ones({1, 2, 8, 64}, on_gpu.dtype(at::kBFloat16)), packed = x[0].transpose(0, 1);
  const Tensor starts = at::tensor({0, 8}, on_gpu.dtype(at::kInt)), others = starts.clone();
  EXPECT_THROW(at::_scaled_dot_product_flash_attention(x, x, x, 0.5), c10::Error);
  EXPECT_THROW(at::_scaled_dot_product_cudnn_attention(x, x, x, {}, true, 0.5), c10::Error);
  EXPECT_THROW(at::_scaled_dot_product_efficient_attention(x, x, x, {}, true, 0.5), c10::Error);
  struct Packed {
    double dropout = 0;
    std::optional<c10::SymInt> left, right;
    std::optional<Tensor> used_keys, slopes;
  };
  const auto attend = [&](const Packed& p, const Tensor& starts_of_keys) {
    at::_flash_attention_forward_symint(packed, packed, packed, starts, starts_of_keys, 8, 8, p.dropout, true,
                                        false, {}, p.left, p.right, p.used_keys, p.slopes);
  };
  EXPECT_NO_THROW(attend({.left = -1, .right = -1}, starts));
  for (const Packed& p : {Packed{.dropout = 0.5}, Packed{.left = 4}, Packed{.right = 0},
                          Packed{.used_keys = starts}, Packed{.slopes = at::ones({2}, on_gpu)}})
    EXPECT_THROW(attend(p, starts), c10::Error);
  EXPECT_THROW(attend({}, others), c10::Error);
  c10::cuda::device_synchronize();
}

TEST_F(Faults, EfficientAttentionsSumsHaveAMultipleOf32Rows) {
  const Tensor x = at::randn({2, 2, 20, 16}, on_gpu);
  const auto [out, sums, seed, offset] = at::_scaled_dot_product_efficient_attention(x, x, x, {}, true);
  EXPECT_EQ(sums.sizes(), at::IntArrayRef({2, 2, 32}));
  EXPECT_TRUE(sums.narrow(2, 20, 12).isinf().all().item<bool>());
  EXPECT_EQ(std::get<1>(at::_scaled_dot_product_efficient_attention(x, x, x, {}, false)).size(2), 0);
  const auto backward = [&, &out = out, &seed = seed, &offset = offset](const Tensor& q, const Tensor& l) {
    return std::get<0>(at::_scaled_dot_product_efficient_attention_backward(
        x, q, x, x, {}, out, l, seed, offset, 0, {true, true, true, false}));
  };
  // With the same sums in rows that the kernel takes, too.
  EXPECT_TRUE(backward(x, sums).equal(backward(x, at::constant_pad_nd(sums.narrow(2, 0, 20), {0, 4}))));
  EXPECT_THROW(backward(x, sums.narrow(2, 0, 20).contiguous()), c10::Error) << "rows of 80 bytes";
  const Tensor wide = at::randn({2, 2, 20, 18}, on_gpu).narrow(3, 0, 16);
  EXPECT_THROW(backward(wide, sums), c10::Error);
  EXPECT_THROW(at::_scaled_dot_product_efficient_attention(wide, x, x, {}, true), c10::Error);
  EXPECT_THROW(backward(x.to(at::kDouble), sums), c10::Error);
  c10::cuda::device_synchronize();
}

TEST_F(Faults, ScaledProductsRefuseWhatTheHardwareLacks) {
  const Tensor many = at::ones({33 * 16}, on_gpu).to(at::kFloat8_e4m3fn), scale = at::ones({}, on_gpu);
  const auto matrix = [&](int64_t first) { return many.narrow(0, first, 32 * 16).view({16, 32}); };
  const auto multiply = [&](const Tensor& a, const Tensor& scale_a, const Tensor& scale_b) {
    at::_scaled_mm(a, matrix(0).t(), scale_a, scale_b, {}, {}, at::kBFloat16);
  };
  EXPECT_NO_THROW(multiply(matrix(0), scale, scale));
  EXPECT_NO_THROW(multiply(matrix(16), scale, scale));
  EXPECT_THROW(multiply(matrix(8), scale, scale), c10::Error);
  // One exponent for each 32 elements: from compute capability 10.0 on.
  const Tensor exponents = at::full({128 * 4}, 127, on_gpu.dtype(at::kByte)).view(at::kFloat8_e8m0fnu);
  if (at::cuda::getCurrentDeviceProperties()->major < 10)
    EXPECT_THROW(multiply(matrix(0), exponents, exponents), c10::Error);
  else
    EXPECT_NO_THROW(multiply(matrix(0), exponents, exponents));
  c10::cuda::device_synchronize();
}

TEST_F(Faults, FindsReadsOfMemoryThatAPoolOfTheProgramHasTakenBack) {
  at::cuda::MemPool pool;
  const int device = at::cuda::current_device();
  c10::cuda::CUDACachingAllocator::beginAllocateToPool(device, pool.id(), [](cudaStream_t) { return true; });
  Tensor x = at::ones({1000}, on_gpu);
  c10::cuda::CUDACachingAllocator::endAllocateToPool(device, pool.id());
  const Tensor same = at::from_blob(x.mutable_data_ptr(), {1000}, on_gpu);
  const int before = num_unwritten_reads();
  same.add_(1);
  EXPECT_EQ(num_unwritten_reads(), before);
  x.reset();
  same.add_(1);
  EXPECT_EQ(num_unwritten_reads(), before + 1);
}

// ---- barriers of kernels

TEST_F(FaultsDeathTest, ThreadsThatWaitAtDifferentBarriersEndTheProgram) {
  const Tensor in = at::ones({64}, on_gpu), out = at::zeros({64}, on_gpu);
  const auto run = [&](const char* kernel) {
    launch_planted(kernel, out, in, 1);
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
}  // namespace virtual_gpu_test

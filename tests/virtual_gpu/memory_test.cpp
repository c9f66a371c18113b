// Memory: when copies reach the host, what new and freed memory holds, and how much LibTorch's allocator takes.

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <optional>
#include <regex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>

#include "virtual_gpu_test.h"

namespace virtual_gpu_test {
namespace {

/// Keeps the stream's later operations from running before it is opened.
class Gate {
 public:
  explicit Gate(cudaStream_t stream) {
    cudaLaunchHostFunc(
        stream, [](void* gate) { static_cast<Gate*>(gate)->wait(); }, this);
  }
  ~Gate() { open(); }
  void open() { is_open_ = true; }

 private:
  void wait() const {
    while (!is_open_) std::this_thread::yield();
  }
  std::atomic<bool> is_open_ = false;
};

TEST_F(VirtualGpu, CopiesReachTheHostOnlyAtASynchronization) {
  const Tensor x = at::full({1000}, 3.f, on_gpu);
  Tensor host = at::zeros({1000}, pinned);
  c10::cuda::device_synchronize();
  Gate gate(main_);
  host.copy_(x, /*non_blocking=*/true);
  at::cuda::CUDAEvent copied;
  copied.record();
  EXPECT_FALSE(copied.query());
  EXPECT_EQ(host.const_data_ptr<float>()[0], 0);
  gate.open();
  copied.synchronize();
  EXPECT_EQ(host.const_data_ptr<float>()[999], 3);
}

TEST_F(VirtualGpu, CopiesThatHaveRunReachTheHostOnlyAtASynchronization) {
  const Tensor x = at::full({1000}, 3.f, on_gpu), y = at::zeros({1000}, on_gpu);
  at::cuda::CUDAEvent copied;
  const std::pair<const char*, std::function<void()>> ways[] = {
      {"event", [&] { copied.synchronize(); }},
      {"query of the event", [&] { EXPECT_TRUE(copied.query()); }},
      {"stream", [&] { main_.synchronize(); }},
      {"query of the stream", [&] { EXPECT_TRUE(main_.query()); }},
      {"device", [] { c10::cuda::device_synchronize(); }},
      {"another stream that waited", [&] {
         copied.block(side_);
         side_.synchronize();
       }}};
  for (const auto& [way, synchronize] : ways) {
    Tensor host = at::zeros({1000}, pinned);
    c10::cuda::device_synchronize();
    host.copy_(x, /*non_blocking=*/true);
    copied.record();
    num_races();  // all that is queued has run
    EXPECT_EQ(host.const_data_ptr<float>()[0], 0) << way;
    other_.synchronize();  // has nothing to do with the copy
    EXPECT_EQ(host.const_data_ptr<float>()[0], 0) << way;
    synchronize();
    EXPECT_EQ(host.const_data_ptr<float>()[0], 3) << way;
    EXPECT_EQ(host.const_data_ptr<float>()[999], 3) << way;
  }
}

TEST_F(VirtualGpu, TheDeviceSeesBytesOnTheirWayToTheHost) {
  const Tensor x = at::full({1000}, 3.f, on_gpu), y = at::zeros({1000}, on_gpu);
  Tensor host = at::zeros({1000}, pinned);
  c10::cuda::device_synchronize();
  host.copy_(x, /*non_blocking=*/true);
  x.fill_(4);
  host.slice(0, 0, 500).copy_(x.slice(0, 0, 500), /*non_blocking=*/true);
  y.copy_(host, /*non_blocking=*/true);
  float seen = 0;
  std::pair<Tensor, float*> of_function{host, &seen};
  cudaLaunchHostFunc(
      main_,
      [](void* given) {
        const auto& [tensor, out] = *static_cast<std::pair<Tensor, float*>*>(given);
        *out = tensor.const_data_ptr<float>()[0];
      },
      &of_function);
  main_.synchronize();
  EXPECT_EQ(seen, 4);
  EXPECT_EQ(y[0].item<float>(), 4);
  EXPECT_EQ(y[999].item<float>(), 3);
  EXPECT_EQ(host.const_data_ptr<float>()[0], 4);
  EXPECT_EQ(host.const_data_ptr<float>()[999], 3);
}

TEST_F(VirtualGpu, BytesOnTheirWayToTheHostDoNotReplaceNewerOnes) {
  const Tensor x = at::full({64}, 3.f, on_gpu), y = at::full({64}, 5.f, on_gpu);
  Tensor host = at::zeros({64}, pinned);
  float* const bytes = host.mutable_data_ptr<float>();
  at::cuda::CUDAEvent copied;
  const std::pair<const char*, std::function<void()>> writers[] = {
      {"a kernel", [&] { launch_planted("sound_kernel", host, y, 1); }},
      {"a kernel on another stream",
       [&] {
         copied.record();
         copied.block(side_);
         const CUDAStreamGuard guard(side_);
         launch_planted("sound_kernel", host, y, 1);
       }},
      {"another copy", [&] { host.copy_(y, /*non_blocking=*/true); }},
      {"a memset and a kernel",
       [&] {
         EXPECT_EQ(cudaMemsetAsync(bytes, 0, 256, main_), cudaSuccess);
         launch_planted("sound_kernel", host, y, 1);
       }},
      {"a function of the host",
       [&] {
         cudaLaunchHostFunc(
             main_, [](void* at) { std::fill_n(static_cast<float*>(at), 64, 5.f); }, bytes);
       }},
      {"the host", [&] {
         copied.record();
         copied.synchronize();
         std::fill_n(bytes, 64, 5.f);
       }}};
  for (const auto& [writer, write] : writers) {
    host.zero_();
    host.copy_(x, /*non_blocking=*/true);
    write();
    c10::cuda::device_synchronize();
    EXPECT_EQ(host.min().item<float>(), 5) << writer;
  }
  host.copy_(x, /*non_blocking=*/true);
  launch_planted("sound_kernel", y, host, 1);
  main_.synchronize();
  host.zero_();
  EXPECT_EQ(y.min().item<float>(), 3) << "a kernel reads them";
  launch_planted("sound_kernel", host, y, 1);
  host.copy_(x.mul_(2), /*non_blocking=*/true);
  c10::cuda::device_synchronize();
  EXPECT_EQ(host.min().item<float>(), 6) << "a copy after a kernel";
}

TEST_F(VirtualGpu, BytesOnTheirWayToFreedHostMemoryDoNotMeetItsNextUse) {
  const Tensor x = at::full({1000}, 3.f, on_gpu);
  for (int i = 0; i < 20; ++i) {
    at::zeros({1000}, pinned).copy_(x, /*non_blocking=*/true);
    num_races();
    const Tensor next = at::full({1000}, 5.f, pinned);
    main_.synchronize();
    EXPECT_TRUE((next == 5).all().item<bool>());
  }
  void* memory = nullptr;
  ASSERT_EQ(cudaMallocHost(&memory, 4000), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(memory, x.const_data_ptr(), 4000, cudaMemcpyDeviceToHost, main_), cudaSuccess);
  ASSERT_EQ(cudaFreeHost(memory), cudaSuccess);
  main_.synchronize();
}

TEST_F(VirtualGpu, NewMemoryIsNaN) {
  const Tensor x = at::empty({1000}, on_gpu);
  EXPECT_TRUE(x.isnan().all().item<bool>());
  EXPECT_TRUE(at::empty({1000}, on_gpu.dtype(at::kBFloat16)).isnan().all().item<bool>());
}

// A copy, unlike what computes, isn't reported.
TEST_F(VirtualGpu, FreedMemoryIsNaN) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    Tensor x = at::ones({1000}, on_gpu.dtype(dtype));
    const Tensor same = at::from_blob(x.mutable_data_ptr(), {1000}, on_gpu.dtype(dtype));
    EXPECT_TRUE((same.cpu() == 1).all().item<bool>()) << dtype;
    const int before = num_unwritten_reads();
    x.reset();
    EXPECT_TRUE(same.cpu().isnan().all().item<bool>()) << dtype;
    EXPECT_EQ(num_unwritten_reads(), before) << dtype;
  }
}

TEST_F(VirtualGpu, FindsReadsOfBytesThatNothingHasWritten) {
  int before = num_unwritten_reads();
  const auto new_reads = [&] { return num_unwritten_reads() - std::exchange(before, num_unwritten_reads()); };
  const Tensor x = at::empty({1000}, on_gpu), written = at::ones({64}, on_gpu);
  x.slice(0, 0, 900).fill_(1);
  x.slice(0, 0, 900).sum();
  const Tensor copied = x.clone();  // moves what nobody computes with
  EXPECT_EQ(new_reads(), 0);
  x.sum();
  EXPECT_EQ(new_reads(), 1);
  at::empty({1000}, on_gpu).add_(1);
  EXPECT_EQ(new_reads(), 1);
  // Rows with padding, written one by one.
  const Tensor rows = at::empty({10, 8}, on_gpu);
  for (int i = 0; i < 10; ++i) rows[i].slice(0, 0, 6).fill_(1);
  rows.slice(1, 0, 6).sum();
  EXPECT_EQ(new_reads(), 0);
  rows.slice(1, 0, 7).sum();
  EXPECT_EQ(new_reads(), 1);
  // Scales of a product.
  const Tensor ones = at::ones({16, 16}, on_gpu).to(at::kFloat8_e4m3fn), scale = at::ones({}, on_gpu);
  const auto multiply = [&](const Tensor& scale_b) {
    at::_scaled_mm(ones, ones.t(), scale, scale_b, {}, {}, at::kBFloat16);
    return new_reads();
  };
  EXPECT_EQ(multiply(scale), 0);
  EXPECT_EQ(multiply(at::empty({}, on_gpu)), 1);
  // A kernel of LibTitan's, which may read what it has written itself.
  launch_planted("sound_kernel", at::empty({64}, on_gpu), written, 1);
  EXPECT_EQ(new_reads(), 0);
  launch_planted("sound_kernel", at::empty({64}, on_gpu), at::empty({64}, on_gpu), 1);
  EXPECT_EQ(new_reads(), 1);
  launch_planted("atomic_sum_kernel", at::empty({64}, on_gpu), written, 1);
  EXPECT_EQ(new_reads(), 1);
  // Each launch of a graph hands out its memory again.
  const CUDAStreamGuard guard(side_);
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  const Tensor within = at::empty({1000}, on_gpu);
  Tensor sum = within.sum();
  within.fill_(1);
  graph.capture_end();
  for (int i = 0; i < 2; ++i) graph.replay();
  EXPECT_EQ(new_reads(), 2);
}

// An operation with more separate pieces than that counts its gaps as written, too.
TEST_F(VirtualGpu, GapsBetweenAtMost4096PiecesStayUnwritten) {
  for (const int pieces : {4096, 4097}) {
    const Tensor rows = at::empty({pieces, 8}, on_gpu);
    rows.slice(1, 0, 6).fill_(1);
    const int before = num_unwritten_reads();
    rows.slice(1, 0, 6).sum();
    EXPECT_EQ(num_unwritten_reads(), before) << pieces;
    rows.slice(0, 0, pieces - 1).slice(1, 0, 7).sum();
    EXPECT_EQ(num_unwritten_reads(), before + (pieces == 4096)) << pieces;
  }
}

TEST_F(VirtualGpu, FindsReadsOfFreedMemory) {
  Tensor x = at::ones({1000}, on_gpu);
  const Tensor same = at::from_blob(x.mutable_data_ptr(), {1000}, on_gpu);
  same.add_(1);
  num_races();
  testing::internal::CaptureStderr();
  x.reset();
  same.add_(1);
  num_races();
  const std::string report = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(std::regex_search(
      report,
      std::regex(
          "UNWRITTEN: aten::add_ reads 4000 bytes at 0x[0-9a-f]+, 0 bytes into its argument, which the "
          "allocator has taken back\n")))
      << report;
}

TEST_F(VirtualGpu, TheFirstProductOnAStreamTakesCublasWorkspace) {
  const CUDAStreamGuard guard(side_);
  const auto allocated = [] {
    return c10::cuda::CUDACachingAllocator::getDeviceStats(0).allocated_bytes[0].current;
  };
  const Tensor x = at::ones({16, 16}, on_gpu);
  const int64_t before = allocated();
  x.mm(x);
  EXPECT_EQ(allocated() - before, int64_t{32} << 20);
  x.mm(x);
  EXPECT_EQ(allocated() - before, int64_t{32} << 20);
}

/// Bytes that the function takes at its peak and doesn't return.
int64_t temporary_bytes(const std::function<std::vector<Tensor>()>& function) {
  namespace allocator = c10::cuda::CUDACachingAllocator;
  c10::cuda::device_synchronize();
  allocator::resetPeakStats(0);
  const std::vector<Tensor> results = function();
  const auto requested = allocator::getDeviceStats(0).requested_bytes[0];
  return requested.peak - requested.current;
}

TEST_F(VirtualGpu, ThePeakHasTheTemporaryMemoryOfCudasKernels) {
  const auto bf16 = on_gpu.dtype(at::kBFloat16);
  constexpr int64_t batch = 2, heads = 4, tokens = 130, padded = 256, size = 40, rounded = 64;
  const Tensor seed, sums = at::ones({batch, heads, tokens}, on_gpu);
  const auto flash_backward = [&](int64_t heads_of_keys, int64_t head_size) {
    const Tensor q = at::ones({batch, heads, tokens, head_size}, bf16),
                 k = at::ones({batch, heads_of_keys, tokens, head_size}, bf16);
    return temporary_bytes([&]() -> std::vector<Tensor> {
      auto [a, b, c] = at::_scaled_dot_product_flash_attention_backward(q, q, k, k, q, sums, seed, seed,
                                                                        tokens, tokens, 0, true, seed, seed);
      return {a, b, c};
    });
  };
  const auto in_float = [](int64_t rounded_size) { return batch * padded * heads * (1 + rounded_size) * 4; };
  // Heads come before tokens here, so the output and its gradient are copied.
  const auto both = [](int64_t head_size) { return 2 * batch * tokens * heads * head_size * 2; };
  EXPECT_EQ(flash_backward(heads, size), both(size) + in_float(rounded));
  EXPECT_EQ(flash_backward(heads, 136), both(136) + in_float(192));
  EXPECT_EQ(flash_backward(heads / 2, size), both(size) + in_float(rounded) + both(size))
      << "two heads share keys";
  const Tensor starts = at::tensor({0, 100, 260}, at::kInt).to(at::kCUDA),
               packed = at::ones({260, heads, size}, bf16);
  const Tensor sums_of_packed = at::ones({heads, 260}, on_gpu);
  EXPECT_EQ(temporary_bytes([&]() -> std::vector<Tensor> {
              auto [a, b, c] =
                  at::_flash_attention_backward(packed, packed, packed, packed, packed, sums_of_packed,
                                                starts, starts, 160, 160, 0, true, seed, seed);
              return {a, b, c};
            }),
            (260 + 2 * 128) * heads * (1 + rounded) * 4);

  const auto embedding_backward = [&](int64_t count, int64_t vocabulary) {
    const Tensor grad = at::ones({count, size}, bf16), indices = at::zeros({count}, on_gpu.dtype(at::kLong));
    return temporary_bytes([&]() -> std::vector<Tensor> {
      return {at::embedding_dense_backward(grad, indices, vocabulary, -1, false)};
    });
  };
  EXPECT_EQ(embedding_backward(3072, 100), 0);
  EXPECT_EQ(embedding_backward(4000, 100), (3 * 4000 + 2 * 100 + 500 + 2) * 8 + 500 * size * 4);
  EXPECT_EQ(embedding_backward(4000, 9000), (3 * 4000 + 2 * 4000 + 4400 + 2) * 8 + 4400 * size * 4);

  const std::vector<Tensor> tensors{at::ones({2 * 65'536 + 1}, bf16), at::ones({7}, bf16)};
  EXPECT_EQ(temporary_bytes([&] { return at::_foreach_norm(tensors); }), 2 * 3 * 4);
  EXPECT_EQ(temporary_bytes([&] { return at::_foreach_norm(tensors, 2, at::kDouble); }), 2 * 3 * 8);
}

// Memory that another stream uses is given out again when that stream is done with it.
class LateMemory : public VirtualGpu {
 protected:
  static constexpr int num_tensors = 10;
  static constexpr int64_t tensor_bytes = int64_t{4} << 20;

  /// The most that tensors take which are made, used on the other stream and freed, one after another.
  int64_t peak_bytes(const std::function<void()>& before, const std::function<void()>& after_each) const {
    namespace allocator = c10::cuda::CUDACachingAllocator;
    c10::cuda::device_synchronize();
    allocator::emptyCache();
    allocator::resetPeakStats(0);
    const auto active = [] { return allocator::getDeviceStats(0).active_bytes[0]; };
    const int64_t at_first = active().current;
    before();
    for (int i = 0; i < num_tensors; ++i) {
      Tensor x = at::empty({tensor_bytes}, on_gpu.dtype(at::kByte));
      at::cuda::CUDAEvent made;
      made.record();
      made.block(side_);
      x.record_stream(side_);
      {
        const CUDAStreamGuard guard(side_);
        x.fill_(1);
      }
      x.reset();
      after_each();
    }
    return active().peak - at_first;
  }
};

TEST_F(LateMemory, ComesBackWhenTheStreamIsDone) {
  const auto nothing = [] {};
  const auto wait = [&] { side_.synchronize(); };
  EXPECT_EQ(peak_bytes(nothing, wait), tensor_bytes);
  std::optional<Gate> gate;
  EXPECT_EQ(peak_bytes([&] { gate.emplace(side_); }, nothing), num_tensors * tensor_bytes);
  gate.reset();
  EXPECT_EQ(peak_bytes(nothing, wait), tensor_bytes) << "all of it came back";
}

TEST_F(LateMemory, ComesBackLateWithADelay) {
  const bool is_late = std::getenv("VIRTUAL_GPU_DELAY_US");
  if (!is_late && !std::getenv("VIRTUAL_GPU_PROMPT")) GTEST_SKIP() << "depends on the machine's speed";
  const int64_t peak = peak_bytes([] {}, [] {});
  if (is_late)
    EXPECT_GT(peak, tensor_bytes);
  else
    EXPECT_EQ(peak, tensor_bytes);
}

}  // namespace
}  // namespace virtual_gpu_test

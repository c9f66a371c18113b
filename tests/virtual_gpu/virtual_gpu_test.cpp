// The virtual GPU itself: numbers, order, memory, graphs, and that each kind of race is found. Runs under scripts/virtual_gpus.sh.

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <regex>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/record_function.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <nccl.h>
#include <torch/csrc/autograd/variable.h>

extern "C" void __cudaRegisterFunction(void**, const char* stub, char*, const char* name, int, uint3*, uint3*,
                                       dim3*, dim3*, int*);

namespace {

using at::Tensor;
using c10::cuda::CUDAStreamGuard;

const at::TensorOptions on_gpu = at::TensorOptions().device(at::kCUDA);
const at::TensorOptions pinned = at::TensorOptions().pinned_memory(true);

int num_races() {
  static const auto count = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "virtual_gpu_num_races"));
  return count();
}

uint64_t count(const char* field, const char* name) {
  static const auto function = reinterpret_cast<uint64_t (*)(const char*, const char*, const char*)>(
      dlsym(RTLD_DEFAULT, "virtual_gpu_count"));
  return function(field, nullptr, name);
}
void start_counting() {
  static const auto function =
      reinterpret_cast<void (*)()>(dlsym(RTLD_DEFAULT, "virtual_gpu_start_counting"));
  function();
}

/// Launches a kernel of simt/planted_kernels.cu on the current stream, for out[64 * num_blocks].
void launch_planted(const char* kernel, const Tensor& out, const Tensor& in, unsigned num_blocks) {
  using Function = void (*)(const char*, float*, const float*, unsigned, cudaStream_t);
  static const auto function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, "virtual_gpu_launch_planted"));
  function(kernel, out.mutable_data_ptr<float>(), in.const_data_ptr<float>(), num_blocks,
           at::cuda::getCurrentCUDAStream());
}

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

/// A capture on the current stream that is expected to fail. LibTorch's allocator stays in it, and keeps freed memory, until endAllocateToPool.
class FailingCapture {
 public:
  FailingCapture() { graph_.capture_begin(pool_); }
  ~FailingCapture() {
    EXPECT_THROW(graph_.capture_end(), c10::Error);
    c10::cuda::CUDACachingAllocator::endAllocateToPool(0, pool_);
    cudaGetLastError();
  }

 private:
  at::cuda::MempoolId_t pool_ = at::cuda::graph_pool_handle();
  at::cuda::CUDAGraph graph_;
};

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

std::vector<Tensor> train(c10::Device device) {
  at::manual_seed(1);
  Tensor qkv = (at::randn({3 * 64, 64}) * 0.1).to(device).requires_grad_();
  Tensor out = (at::randn({100, 64}) * 0.1).to(device).requires_grad_();
  const Tensor x = at::randn({2, 16, 64}).to(device),
               labels = at::randint(0, 100, {32}, at::kLong).to(device);
  std::vector<Tensor> weights{qkv, out}, first{at::zeros_like(qkv), at::zeros_like(out)},
      second{at::zeros_like(qkv), at::zeros_like(out)};
  std::vector<Tensor> steps{at::zeros({}, device), at::zeros({}, device)}, results;
  for (int step = 0; step < 3; ++step) {
    const Tensor heads = at::linear(x, qkv).view({2, 16, 3, 4, 16}).permute({2, 0, 3, 1, 4});
    const Tensor attention = at::scaled_dot_product_attention(heads[0], heads[1], heads[2], {}, 0.0, true);
    const Tensor loss =
        at::cross_entropy_loss(at::linear(attention.transpose(1, 2).reshape({32, 64}), out), labels);
    loss.backward();
    const std::vector<Tensor> gradients{qkv.grad(), out.grad()};
    results.push_back(loss.detach());
    results.push_back(at::stack(at::_foreach_norm(gradients)).norm());
    const at::NoGradGuard no_grad;
    for (Tensor& s : steps) s.add_(1);
    // An fp32 number: CUDA's kernel rounds the learning rate, and the CPU's doesn't.
    at::_fused_adamw_(weights, gradients, first, second, {}, steps, 0x1p-7, 0.9, 0.95, 0.1, 1e-8, false,
                      false, {}, {});
    for (Tensor& w : weights) w.mutable_grad().reset();
  }
  results.insert(results.end(), {qkv.detach(), out.detach()});
  for (Tensor& t : results) t = t.cpu();
  return results;
}

[[noreturn]] void print_buses() {
  int count = 0;
  std::string text;
  if (cudaGetDeviceCount(&count) == cudaErrorNoDevice) text = "no device";
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties;
    char bus[32];
    int same = -1;
    cudaGetDeviceProperties(&properties, device);
    cudaDeviceGetPCIBusId(bus, sizeof bus, device);
    cudaDeviceGetByPCIBusId(&same, bus);
    if (same != device || properties.uuid.bytes[15] + 1 != properties.pciBusID) abort();
    text += (device == 0 ? "buses " : " ") + std::to_string(properties.pciBusID);
  }
  fprintf(stderr, "%s;\n", text.c_str());
  _exit(0);
}

// Each program reads the variable once: it sees the buses of these devices, or an error.
TEST(VisibleDevices, AreThoseThatTheVariableNamesInItsOrder) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a new program for each
  setenv("VIRTUAL_GPU_DEVICES", "4", 1);
  const std::map<std::string, std::string> buses = {
      {"2,0,7,1", "buses 3 1;"},
      {"2,2", "no device"},
      {"GPU-76000000-0000-0000-0000-000000000003,1gpu,-1,0", "buses 4 2;"}};
  for (const auto& [visible, expected] : buses) {
    setenv("CUDA_VISIBLE_DEVICES", visible.c_str(), 1);
    EXPECT_EXIT(print_buses(), testing::ExitedWithCode(0), expected) << visible;
  }
  unsetenv("CUDA_VISIBLE_DEVICES");
  setenv("VIRTUAL_GPU_DEVICES", "1", 1);
}

// ---- settings, which a program reads once: each has a program of its own

/// Launches of a thread of its own, which wait for a gate, and how many of them have returned.
class Launches {
 public:
  explicit Launches(int number) {
    cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
    thread_ = std::thread([this, number] {
      cudaLaunchHostFunc(stream_, &wait, this);
      for (num_returned_ = 1; num_returned_ < number; ++num_returned_)
        cudaLaunchHostFunc(stream_, &count, this);
    });
  }
  /// The number that have returned when no more do.
  int num_returned() const {
    for (int last = -1; last != num_returned_; std::this_thread::sleep_for(std::chrono::milliseconds(200)))
      last = num_returned_;
    return num_returned_;
  }
  /// @returns the number that have run
  int finish() {
    is_open_ = true;
    thread_.join();
    cudaStreamSynchronize(stream_);
    return num_run_;
  }

 private:
  static void wait(void* self) {
    while (!static_cast<Launches*>(self)->is_open_) std::this_thread::yield();
    count(self);
  }
  static void count(void* self) { ++static_cast<Launches*>(self)->num_run_; }

  cudaStream_t stream_ = nullptr;
  std::atomic<int> num_returned_ = 0, num_run_ = 0;
  std::atomic<bool> is_open_ = false;
  std::thread thread_;
};

[[noreturn]] void print_launches() {
  Launches launches(8);
  const int num_returned = launches.num_returned();
  const int num_run = launches.finish();
  fprintf(stderr, "%d of %d launches returned;\n", num_returned, num_run);
  _exit(0);
}

// With CUDA_LAUNCH_BLOCKING: whether each launch returns after its work is done.
[[noreturn]] void print_waits() {
  std::string text;
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  for (int i = 0; i < 3; ++i) {
    std::atomic<bool> is_done = false;
    cudaLaunchHostFunc(
        stream,
        [](void* done) {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          *static_cast<std::atomic<bool>*>(done) = true;
        },
        &is_done);
    text += is_done ? " done" : " not done";
    cudaStreamSynchronize(stream);
  }
  fprintf(stderr, "launches:%s;\n", text.c_str());
  _exit(0);
}

// Two streams run one operation each, whose delays the seed decides.
[[noreturn]] void print_order() {
  static std::atomic<char> next = 0;
  static char order[2];
  cudaStream_t streams[2];
  for (cudaStream_t& stream : streams) cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  static char names[] = "ab";
  for (int i = 0; i < 2; ++i)
    cudaLaunchHostFunc(
        streams[i], [](void* name) { order[next++] = *static_cast<char*>(name); }, &names[i]);
  cudaDeviceSynchronize();
  fprintf(stderr, "order %.2s;\n", order);
  _exit(0);
}

[[noreturn]] void print_order_of_warps() {
  const Tensor in = at::ones({64}, on_gpu), out = at::zeros({64}, on_gpu);
  launch_planted("order_of_warps_kernel", out, in, 1);
  const Tensor first = out.slice(0, 32).cpu();
  std::string text;
  for (int i = 0; i < 32; ++i) text += first[i].item<float>() == 1 ? '0' : '1';
  fprintf(stderr, "warps %s;\n", text.c_str());
  _exit(0);
}

class Setting {
 public:
  Setting(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Setting() { unsetenv(name_); }

 private:
  const char* name_;
};

[[noreturn]] void add_on_two_devices() {
  std::string text = "nothing";
  try {
    at::ones({2}, on_gpu) + at::ones({2}, on_gpu.device(c10::Device(at::kCUDA, 1)));
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
  }
  fprintf(stderr, "error: %s;\n", text.c_str());
  _exit(0);
}

TEST(Settings, OperationsRefuseTensorsOfTwoDevices) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const Setting devices("VIRTUAL_GPU_DEVICES", "2");
  EXPECT_EXIT(add_on_two_devices(), testing::ExitedWithCode(0),
              "error: Expected all tensors to be on the same device");
}

TEST(Settings, ALaunchBeyondTheQueuesLimitWaits) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(print_launches(), testing::ExitedWithCode(0), "8 of 8 launches returned;");
  const Setting limit("VIRTUAL_GPU_QUEUE_LIMIT", "3");
  EXPECT_EXIT(print_launches(), testing::ExitedWithCode(0), "3 of 8 launches returned;");
}

TEST(Settings, EachLaunchWaitsWhereLaunchesBlock) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(print_waits(), testing::ExitedWithCode(0), "launches: not done not done not done;");
  const Setting blocking("CUDA_LAUNCH_BLOCKING", "1");
  EXPECT_EXIT(print_waits(), testing::ExitedWithCode(0), "launches: done done done;");
  EXPECT_EXIT(print_launches(), testing::ExitedWithCode(0), "0 of 8 launches returned;");
}

TEST(Settings, TheSeedDecidesTheOrderOfStreams) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const Setting delay("VIRTUAL_GPU_DELAY_US", "400000");
  for (const auto& [seed, order] :
       std::map<std::string, std::string>{{"14", "order ab;"}, {"7", "order ba;"}}) {
    const Setting setting("VIRTUAL_GPU_SEED", seed.c_str());
    EXPECT_EXIT(print_order(), testing::ExitedWithCode(0), order) << "seed " << seed;
  }
}

TEST(Settings, TheSeedDecidesTheOrderOfWarps) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const char* expected[] = {"warps 01111111010101010110010001110110;",
                            "warps 10111101100101001010111101111110;"};
  for (const int seed : {1, 2}) {
    const Setting setting("VIRTUAL_GPU_SEED", std::to_string(seed).c_str());
    EXPECT_EXIT(print_order_of_warps(), testing::ExitedWithCode(0), expected[seed - 1]) << "seed " << seed;
  }
}

TEST_F(VirtualGpu, ComputesTheCpusNumbers) {
  const std::vector<Tensor> cpu = train(at::kCPU), gpu = train(at::kCUDA);
  for (size_t i = 0; i < cpu.size(); ++i) EXPECT_TRUE(cpu[i].equal(gpu[i])) << "result " << i;
  EXPECT_EQ(new_races(), 0);
}

TEST_F(VirtualGpu, ViewsAndOutputsShareMemory) {
  const Tensor x = at::zeros({4, 4}, on_gpu);
  x.view({16}).slice(0, 0, 16, 5).fill_(7);
  x.t().select(0, 1).add_(1);
  EXPECT_TRUE(x.cpu().equal(at::tensor({7., 1., 0., 0., 0., 8., 0., 0., 0., 1., 7., 0., 0., 1., 0., 7.})
                                .view({4, 4})
                                .to(at::kFloat)));
  Tensor out = at::empty({0}, on_gpu);
  at::add_out(out, x, x);
  EXPECT_EQ(out.sum().item<float>(), 64);
  EXPECT_EQ(x.index({x > 0}).numel(), 7);
  EXPECT_TRUE((x == 7).logical_not().cpu().equal((x.cpu() == 7).logical_not()));
}

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

TEST_F(VirtualGpu, FindsReadsOfBytesThatNothingHasWritten) {
  static const auto num_reads =
      reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "virtual_gpu_num_unwritten_reads"));
  ASSERT_TRUE(num_reads);
  int before = num_reads();
  const auto new_reads = [&] { return num_reads() - std::exchange(before, num_reads()); };
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
  static const auto num_reads =
      reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "virtual_gpu_num_unwritten_reads"));
  for (const int pieces : {4096, 4097}) {
    const Tensor rows = at::empty({pieces, 8}, on_gpu);
    rows.slice(1, 0, 6).fill_(1);
    const int before = num_reads();
    rows.slice(1, 0, 6).sum();
    EXPECT_EQ(num_reads(), before) << pieces;
    rows.slice(0, 0, pieces - 1).slice(1, 0, 7).sum();
    EXPECT_EQ(num_reads(), before + (pieces == 4096)) << pieces;
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

// Users have published torch.rand(3, device="cuda") and torch.randn(3, device="cuda") after torch.manual_seed(0), with four digits.
TEST_F(VirtualGpu, DrawsTheRandomNumbersOfAGpu) {
  at::manual_seed(0);
  EXPECT_TRUE(at::rand({3}, on_gpu).cpu().allclose(at::tensor({0.3990f, 0.5167f, 0.0249f}), 0, 6e-5));
  at::manual_seed(0);
  EXPECT_TRUE(at::randn({3}, on_gpu).cpu().allclose(at::tensor({-0.9247f, -0.4253f, -2.6438f}), 0, 6e-5));
  // The same numbers in two calls as in two calls of a generator whose state was restored.
  auto generator = at::cuda::detail::getDefaultCUDAGenerator(0);
  const Tensor state = generator.get_state();
  const Tensor first = at::randint(0, 1000, {5000}, on_gpu), second = at::randint(0, 1000, {5000}, on_gpu);
  generator.set_state(state);
  EXPECT_TRUE(at::randint(0, 1000, {5000}, on_gpu).equal(first));
  EXPECT_TRUE(at::randint(0, 1000, {5000}, on_gpu).equal(second));
  EXPECT_FALSE(first.equal(second));
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
  EXPECT_EQ(flash_backward(heads, size), in_float(rounded));
  EXPECT_EQ(flash_backward(heads, 136), in_float(192));
  EXPECT_EQ(flash_backward(heads / 2, size), in_float(rounded) + 2 * batch * tokens * heads * size * 2)
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
  EXPECT_EQ(embedding_backward(4000, 100), (3 * 4000 + 2 * 100 + 500) * 8 + 500 * size * 4);
  EXPECT_EQ(embedding_backward(4000, 9000), (3 * 4000 + 2 * 4000 + 4400) * 8 + 4400 * size * 4);

  const std::vector<Tensor> tensors{at::ones({2 * 65'536 + 1}, bf16), at::ones({7}, bf16)};
  EXPECT_EQ(temporary_bytes([&] { return at::_foreach_norm(tensors); }), 2 * 3 * 4);
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

// ---- what LibTorch's kernels for GPUs refuse

TEST_F(VirtualGpu, AttentionRefusesTypesAndHeadSizesOfNoKernel) {
  const auto heads = [](int64_t size, at::ScalarType type) {
    return at::zeros({1, 2, 4, size}, on_gpu.dtype(type));
  };
  const auto flash = [](const Tensor& x) {
    at::_scaled_dot_product_flash_attention(x, x, x, 0, true, false);
  };
  const auto cudnn = [](const Tensor& x) {
    at::_scaled_dot_product_cudnn_attention(x, x, x, {}, true, 0, true, false);
  };
  const auto efficient = [](const Tensor& x) {
    at::_scaled_dot_product_efficient_attention(x, x, x, {}, true, 0, true);
  };
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    EXPECT_NO_THROW(flash(heads(64, type)));
    EXPECT_NO_THROW(cudnn(heads(64, type)));
    EXPECT_NO_THROW(efficient(heads(64, type)));
  }
  EXPECT_NO_THROW(efficient(heads(64, at::kFloat)));
  EXPECT_NO_THROW(flash(heads(256, at::kBFloat16)));
  EXPECT_THROW(flash(heads(64, at::kFloat)), c10::Error);
  EXPECT_THROW(cudnn(heads(64, at::kFloat)), c10::Error);
  EXPECT_THROW(efficient(heads(64, at::kDouble)), c10::Error);
  EXPECT_THROW(flash(heads(264, at::kBFloat16)), c10::Error);
  EXPECT_THROW(cudnn(heads(60, at::kBFloat16)), c10::Error);
  const Tensor q = heads(64, at::kBFloat16), k = heads(64, at::kHalf);
  EXPECT_THROW(at::_scaled_dot_product_flash_attention(q, k, k, 0, true, false), c10::Error);
  c10::cuda::device_synchronize();
}

// ---- profiles

using Profile = VirtualGpu;

TEST_F(Profile, ReportsItsPropertiesAndComputes) {
  struct Expected {
    const char *profile, *name;
    size_t bytes;
    int multiprocessors, major;
  };
  constexpr Expected all[] = {{"a100", "Virtual A100 80GB", 85'094'825'984, 108, 8},
                              {"h100", "Virtual H100 80GB", 85'017'755'648, 132, 9},
                              {"h100_96gb", "Virtual H100 96GB", 101'993'545'728, 132, 9},
                              {"h200", "Virtual H200", 150'109'487'104, 132, 9},
                              {"b200", "Virtual B200", 191'514'017'792, 148, 10}};
  const char* chosen = std::getenv("VIRTUAL_GPU_PROFILE");
  const auto* expected =
      std::ranges::find(all, std::string_view(chosen ? chosen : "h100"), &Expected::profile);
  ASSERT_NE(expected, std::end(all));
  const auto* properties = at::cuda::getCurrentDeviceProperties();
  EXPECT_STREQ(properties->name, expected->name);
  EXPECT_EQ(properties->totalGlobalMem, expected->bytes);
  EXPECT_EQ(properties->multiProcessorCount, expected->multiprocessors);
  EXPECT_EQ(properties->major, expected->major);
  EXPECT_EQ(properties->minor, 0);
  EXPECT_EQ(at::cuda::getNumGPUs(), 1);
  // All but what a context takes can be had.
  const auto empty = [](size_t bytes) {
    return at::empty({static_cast<int64_t>(bytes)}, on_gpu.dtype(at::kByte));
  };
  EXPECT_EQ(empty(expected->bytes - (size_t{1} << 30)).nbytes(), expected->bytes - (size_t{1} << 30));
  EXPECT_THROW(empty(expected->bytes), c10::OutOfMemoryError);
  const std::vector<Tensor> cpu = train(at::kCPU), gpu = train(at::kCUDA);
  for (size_t i = 0; i < cpu.size(); ++i) EXPECT_TRUE(cpu[i].equal(gpu[i])) << "result " << i;
  EXPECT_EQ(new_races(), 0);
}

TEST_F(VirtualGpu, GraphsRecordWithoutRunningAndReplay) {
  const CUDAStreamGuard guard(side_);
  const Tensor in = at::ones({4}, on_gpu), count = at::zeros({1}, on_gpu);
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  count.add_(1);
  const Tensor out = (in * 2 + 1).sum();
  graph.capture_end();
  EXPECT_EQ(count.item<float>(), 0);
  graph.replay();
  EXPECT_EQ(out.item<float>(), 12);
  in.fill_(2);
  graph.replay();
  EXPECT_EQ(out.item<float>(), 20);
  EXPECT_EQ(count.item<float>(), 2);
}

// A launch reads what the memory of the host holds then; what is passed by value is that of the capture.
TEST_F(VirtualGpu, EachLaunchOfAGraphReadsTheHostsMemoryAgain) {
  const CUDAStreamGuard guard(side_);
  const Tensor copied = at::zeros({64}, on_gpu), computed = at::zeros({64}, on_gpu);
  Tensor host = at::full({64}, 1.f, pinned), returned = at::zeros({64}, pinned), number = at::full({}, 10.f);
  c10::cuda::device_synchronize();
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  copied.copy_(host, /*non_blocking=*/true);
  launch_planted("sound_kernel", computed, host, 1);
  computed.add_(number);
  returned.copy_(computed, /*non_blocking=*/true);
  graph.capture_end();
  number.fill_(20);
  for (const float value : {2.f, 3.f}) {
    host.fill_(value);
    graph.replay();
    num_races();  // it has run
    EXPECT_EQ(returned.const_data_ptr<float>()[0], value == 2 ? 0 : 12) << "before the host synchronizes";
    side_.synchronize();
    EXPECT_EQ(returned.const_data_ptr<float>()[0], value + 10);
    EXPECT_EQ(copied.min().item<float>(), value);
    EXPECT_EQ(computed.min().item<float>(), value + 10);
  }
  graph.replay();
  host.fill_(4);
  EXPECT_GE(new_races(), 1) << "the host changes what a launch may still read";
  side_.synchronize();
}

TEST_F(VirtualGpu, AReadDuringACaptureFails) {
  const CUDAStreamGuard guard(side_);
  const Tensor in = at::ones({4}, on_gpu);
  const std::pair<const char*, std::function<void()>> reads[] = {
      {"item", [&] { in.sum().item<float>(); }},
      {"copy_ to pinned memory", [&] { at::zeros({4}, pinned).copy_(in); }},
      {"equal", [&] { in.equal(in); }},
      {"nonzero", [&] { in.nonzero(); }},
      {"an index by a mask", [&] { in.index({in > 0}); }}};
  for (const auto& [name, read] : reads) {
    SCOPED_TRACE(name);
    const FailingCapture capture;
    EXPECT_THROW(read(), c10::Error);
  }
  // LibTorch refuses this one before it calls CUDA.
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  EXPECT_THROW(in.cpu(), c10::Error);
  in.add_(1);
  graph.capture_end();
}

// As CUDA's launches do: cudaErrorStreamCaptureInvalidated.
TEST_F(VirtualGpu, ACaptureThatHasFailedTakesNoMoreOperations) {
  const CUDAStreamGuard guard(side_);
  const Tensor x = at::ones({64}, on_gpu), y = at::ones({64}, on_gpu);
  float* const data = x.mutable_data_ptr<float>();
  ncclUniqueId id;
  ncclComm_t communicator = nullptr;
  ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  ASSERT_EQ(ncclCommInitRank(&communicator, 1, id, 0), ncclSuccess);
  start_counting();
  std::optional<FailingCapture> capture(std::in_place);
  EXPECT_EQ(cudaStreamQuery(side_), cudaErrorStreamCaptureUnsupported);
  cudaGetLastError();
  EXPECT_THROW(x.add_(1), c10::Error);
  launch_planted("sound_kernel", x, y, 1);
  EXPECT_EQ(cudaGetLastError(), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(cudaLaunchHostFunc(
                side_, [](void*) {}, nullptr),
            cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(ncclAllReduce(data, data, 1, ncclFloat, ncclSum, communicator, side_), ncclUnhandledCudaError);
  capture.reset();
  for (const char* name : {"aten::add_", "sound_kernel", "host function", "ncclAllReduce"})
    EXPECT_EQ(count("launches", name), 0u) << name;
  x.add_(1);
  EXPECT_EQ(x.min().item<float>(), 2);
  EXPECT_EQ(ncclCommDestroy(communicator), ncclSuccess);
}

TEST_F(VirtualGpu, ACaptureFailsUnlessTheWorkOfAllItsStreamsIsJoined) {
  const cudaStream_t origin = side_, first = other_, second = at::cuda::getStreamFromPool();
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, 64), cudaSuccess);
  const auto work = [&](cudaStream_t stream) {
    EXPECT_EQ(cudaMemsetAsync(memory, 0, 64, stream), cudaSuccess);
  };
  const auto follow = [](cudaStream_t later, cudaStream_t earlier) {
    cudaEvent_t event = nullptr;
    EXPECT_EQ(cudaEventCreate(&event), cudaSuccess);
    EXPECT_EQ(cudaEventRecord(event, earlier), cudaSuccess);
    EXPECT_EQ(cudaStreamWaitEvent(later, event, 0), cudaSuccess);
    EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
  };
  const auto fork = [&](cudaStream_t stream) { follow(stream, origin); };
  struct Row {
    const char* name;
    std::function<void()> capture;
    cudaError_t error;
  };
  constexpr auto unjoined = cudaErrorStreamCaptureUnjoined;
  const Row rows[] = {
      {"joined", [&] { fork(first), work(first), follow(origin, first); }, cudaSuccess},
      {"not joined", [&] { fork(first), work(first); }, unjoined},
      {"nothing to join", [&] { fork(first); }, cudaSuccess},
      {"joined by another stream",
       [&] { fork(first), work(first), follow(second, first), follow(origin, second); }, cudaSuccess},
      {"joined to a stream that isn't", [&] { fork(first), work(first), follow(second, first); }, unjoined},
      {"joined to a stream that was joined before",
       [&] {
         fork(first), fork(second), work(first), work(second), follow(origin, second);
         follow(second, first);
       },
       unjoined},
      {"work after the join", [&] { fork(first), work(first), follow(origin, first), work(first); },
       unjoined},
  };
  for (const auto& [name, capture, error] : rows) {
    SCOPED_TRACE(name);
    ASSERT_EQ(cudaStreamBeginCapture(origin, cudaStreamCaptureModeRelaxed), cudaSuccess);
    work(origin);
    capture();
    cudaGraph_t graph = nullptr;
    EXPECT_STREQ(cudaGetErrorName(cudaStreamEndCapture(origin, &graph)), cudaGetErrorName(error));
    EXPECT_EQ(graph != nullptr, error == cudaSuccess);
    if (graph) cudaGraphDestroy(graph);
    cudaGetLastError();
  }
  cudaFree(memory);
  // Memory that is freed after the join is no work.
  const CUDAStreamGuard guard(side_);
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  at::cuda::CUDAEvent begun, done;
  begun.record();
  begun.block(other_);
  Tensor x;
  {
    const CUDAStreamGuard on_other(other_);
    x = at::ones({4}, on_gpu);
    done.record();
  }
  done.block(side_);
  x.reset();
  graph.capture_end();
}

// https://docs.nvidia.com/cuda/cuda-programming-guide, "Prohibited and unhandled operations" of stream capture; modes as documented at
// cudaThreadExchangeStreamCaptureMode.
TEST_F(VirtualGpu, CallsThatAreNotAllowedDuringACaptureFailAsCudas) {
  constexpr auto global = cudaStreamCaptureModeGlobal, local = cudaStreamCaptureModeThreadLocal,
                 relaxed = cudaStreamCaptureModeRelaxed;
  constexpr auto unsupported = cudaErrorStreamCaptureUnsupported;
  cudaEvent_t before = nullptr, within = nullptr, of_merged = nullptr;
  for (cudaEvent_t* event : {&before, &within, &of_merged}) ASSERT_EQ(cudaEventCreate(event), cudaSuccess);
  void *device = nullptr, *host = nullptr;
  ASSERT_EQ(cudaMalloc(&device, 64), cudaSuccess);
  ASSERT_EQ(cudaMallocHost(&host, 64), cudaSuccess);
  int pageable[16] = {};
  const cudaStream_t stream = side_, merged = other_;
  const auto allocate = [] {
    void* memory = nullptr;
    const cudaError_t error = cudaMalloc(&memory, 64);
    cudaFree(memory);
    return error;
  };
  struct Row {
    const char* call;
    std::function<cudaError_t()> run;
    cudaStreamCaptureMode mode;
    cudaError_t error, error_on_other_thread;
  };
  const auto query = [&] { return cudaEventQuery(before); };
  const auto wait = [&] { return cudaEventSynchronize(before); };
  const auto copy = [&] { return cudaMemcpy(device, pageable, 64, cudaMemcpyHostToDevice); };
  const auto on_stream = [&](auto function) { return [=] { return function(stream); }; };
  const Row rows[] = {
      {"cudaEventQuery", query, global, unsupported, unsupported},
      {"cudaEventQuery", query, local, unsupported, cudaSuccess},
      {"cudaEventQuery", query, relaxed, cudaSuccess, cudaSuccess},
      {"cudaEventSynchronize", wait, global, unsupported, unsupported},
      {"cudaEventSynchronize", wait, local, unsupported, cudaSuccess},
      {"cudaEventSynchronize", wait, relaxed, cudaSuccess, cudaSuccess},
      {"cudaMalloc", allocate, global, unsupported, unsupported},
      {"cudaMalloc", allocate, local, unsupported, cudaSuccess},
      {"cudaMalloc", allocate, relaxed, cudaSuccess, cudaSuccess},
      {"cudaMemcpy", copy, global, unsupported, unsupported},
      {"cudaMemcpy", copy, local, unsupported, cudaSuccess},
      {"cudaMemcpy", copy, relaxed, cudaSuccess, cudaSuccess},
      {"cudaDeviceSynchronize", cudaDeviceSynchronize, global, unsupported, unsupported},
      {"cudaDeviceSynchronize", cudaDeviceSynchronize, relaxed, unsupported, unsupported},
      {"cudaStreamSynchronize", on_stream(cudaStreamSynchronize), relaxed, unsupported, unsupported},
      {"cudaStreamQuery", on_stream(cudaStreamQuery), relaxed, unsupported, unsupported},
      {"cudaEventQuery of a captured event", [&] { return cudaEventQuery(within); }, relaxed,
       cudaErrorCapturedEvent, cudaErrorCapturedEvent},
      {"cudaEventSynchronize of a captured event", [&] { return cudaEventSynchronize(within); }, relaxed,
       cudaErrorCapturedEvent, cudaErrorCapturedEvent},
      {"a wait for an event of before", [&] { return cudaStreamWaitEvent(stream, before, 0); }, relaxed,
       cudaErrorStreamCaptureIsolation, cudaErrorStreamCaptureIsolation},
      {"a wait for another capture", [&] { return cudaStreamWaitEvent(stream, of_merged, 0); }, relaxed,
       cudaErrorStreamCaptureMerge, cudaErrorStreamCaptureMerge},
      {"cudaMemcpyAsync to pageable memory",
       [&] { return cudaMemcpyAsync(pageable, device, 64, cudaMemcpyDeviceToHost, stream); }, relaxed,
       unsupported, unsupported},
      {"cudaMemcpyAsync to pinned memory",
       [&] { return cudaMemcpyAsync(host, device, 64, cudaMemcpyDeviceToHost, stream); }, global, cudaSuccess,
       cudaSuccess},
  };
  for (const auto& [call, run, mode, error, error_on_other_thread] : rows) {
    for (const bool on_other_thread : {false, true}) {
      SCOPED_TRACE(std::string(call) + ", mode " + std::to_string(mode) +
                   (on_other_thread ? ", another thread" : ""));
      ASSERT_EQ(cudaEventRecord(before, main_), cudaSuccess);
      main_.synchronize();
      ASSERT_EQ(cudaStreamBeginCapture(stream, mode), cudaSuccess);
      ASSERT_EQ(cudaEventRecord(within, stream), cudaSuccess);
      ASSERT_EQ(cudaStreamBeginCapture(merged, relaxed), cudaSuccess);
      ASSERT_EQ(cudaEventRecord(of_merged, merged), cudaSuccess);
      cudaError_t found = cudaSuccess;
      if (on_other_thread)
        std::thread([&] { found = run(); }).join();
      else
        found = run();
      const cudaError_t expected = on_other_thread ? error_on_other_thread : error;
      EXPECT_STREQ(cudaGetErrorName(found), cudaGetErrorName(expected));
      // A call that isn't allowed ends the capture, and the stream takes no more copies or events.
      const cudaError_t later = expected == cudaSuccess ? cudaSuccess : cudaErrorStreamCaptureInvalidated;
      EXPECT_STREQ(cudaGetErrorName(cudaEventRecord(within, stream)), cudaGetErrorName(later));
      EXPECT_STREQ(cudaGetErrorName(cudaMemsetAsync(device, 0, 64, stream)), cudaGetErrorName(later));
      cudaGraph_t graph = nullptr;
      EXPECT_STREQ(cudaGetErrorName(cudaStreamEndCapture(stream, &graph)), cudaGetErrorName(later));
      if (graph) cudaGraphDestroy(graph);
      graph = nullptr;
      cudaStreamEndCapture(merged, &graph);
      if (graph) cudaGraphDestroy(graph);
      cudaGetLastError();
    }
  }
  EXPECT_EQ(cudaStreamWaitEvent(stream, within, 0), cudaErrorCapturedEvent) << "of a capture that has ended";
  cudaGetLastError();
  for (cudaEvent_t event : {before, within, of_merged}) cudaEventDestroy(event);
  cudaFree(device);
  cudaFreeHost(host);
}

// ---- races: each kind is planted, and its sound counterpart isn't reported

TEST_F(VirtualGpu, FindsAMissingWait) {
  const Tensor x = at::ones({1000}, on_gpu);
  c10::cuda::device_synchronize();
  const auto use_on_side = [&](bool waits) {
    x.add_(1);
    at::cuda::CUDAEvent written;
    written.record();
    if (waits) written.block(side_);
    const CUDAStreamGuard guard(side_);
    x.mul_(2);
  };
  use_on_side(true);
  EXPECT_EQ(new_races(), 0);
  c10::cuda::device_synchronize();
  use_on_side(false);
  EXPECT_EQ(new_races(), 1);
  c10::cuda::device_synchronize();
}

TEST_F(VirtualGpu, ARaceIsReportedWithTheModulesOfBothAccesses) {
  const Tensor x = at::ones({1000}, on_gpu);
  c10::cuda::device_synchronize();
  testing::internal::CaptureStderr();
  {
    RECORD_USER_SCOPE("layers.0");
    x.add_(1);
    num_races();  // it has run
  }
  {
    RECORD_USER_SCOPE("layers.1 backward");
    const CUDAStreamGuard on_side(side_);
    x.sum();
  }
  EXPECT_EQ(new_races(), 1);
  const std::string report = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(std::regex_search(
      report,
      std::regex("RACE: aten::sum in layers\\.1 backward reads 4000 bytes at 0x[0-9a-f]+ on stream [0-9]+, "
                 "and nothing orders it after aten::add_ in layers\\.0, which wrote them on stream -1\n")))
      << report;
  const std::string calls = R"( was called by\n(    \S+\+0x.*\n)*    virtual_gpu_test\+0x.*\n)";
  for (const std::string access : {"aten::sum in layers\\.1 backward", "aten::add_ in layers\\.0"})
    EXPECT_TRUE(std::regex_search(report, std::regex("  " + access + calls))) << report;
  c10::cuda::device_synchronize();
}

TEST_F(VirtualGpu, TwoReadsAreNoRace) {
  const Tensor x = at::ones({1000}, on_gpu);
  c10::cuda::device_synchronize();
  for (const auto& stream : {side_, other_}) {
    const CUDAStreamGuard guard(stream);
    const Tensor y = x + 1;
  }
  c10::cuda::device_synchronize();
  EXPECT_EQ(new_races(), 0);
}

TEST_F(VirtualGpu, FindsAMissingRecordStream) {
  const auto use_freed = [&](bool records) {
    c10::cuda::device_synchronize();
    {
      const Tensor x = at::ones({1 << 20}, on_gpu);
      at::cuda::CUDAEvent written;
      written.record();
      written.block(side_);
      const CUDAStreamGuard guard(side_);
      x.mul_(2);
      if (records) x.record_stream(side_);
    }
    at::ones({1 << 20}, on_gpu);
  };
  use_freed(true);
  EXPECT_EQ(new_races(), 0);
  use_freed(false);
  EXPECT_GE(new_races(), 1);
}

TEST_F(VirtualGpu, FindsAHostReadBeforeTheSynchronization) {
  const Tensor x = at::ones({1000}, on_gpu);
  const auto read = [&](bool waits) {
    Tensor host = at::empty({1000}, pinned);
    host.copy_(x, /*non_blocking=*/true);
    if (waits) main_.synchronize();
    at::sum(host);
    main_.synchronize();
  };
  read(true);
  EXPECT_EQ(new_races(), 0);
  read(false);
  EXPECT_GE(new_races(), 1);  // the copy may find the read, too
}

TEST_F(VirtualGpu, FindsAMissingWaitWithinAGraph) {
  const Tensor x = at::ones({1000}, on_gpu), y = at::zeros({1000}, on_gpu);
  c10::cuda::device_synchronize();
  const auto replay = [&](bool waits) {
    const CUDAStreamGuard guard(side_);
    at::cuda::CUDAGraph graph;
    graph.capture_begin();
    at::cuda::CUDAEvent begun, written, read;
    begun.record();
    begun.block(other_);
    x.add_(1);
    written.record();
    if (waits) written.block(other_);
    {
      const CUDAStreamGuard on_other(other_);
      y.add_(x);
      read.record();
    }
    read.block(side_);
    graph.capture_end();
    graph.replay();
    graph.replay();
    c10::cuda::device_synchronize();
  };
  replay(true);
  EXPECT_EQ(new_races(), 0);
  replay(false);
  EXPECT_GE(new_races(), 1);
}

// The origin's operations before a launch come before all lanes, and those after it come after them.
TEST_F(VirtualGpu, OrdersAGraphsLanesWithTheStreamThatLaunchesIt) {
  const Tensor x = at::ones({1000}, on_gpu), y = at::zeros({1000}, on_gpu);
  c10::cuda::device_synchronize();
  const CUDAStreamGuard guard(side_);
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  at::cuda::CUDAEvent begun, done;
  begun.record();
  begun.block(other_);
  {
    const CUDAStreamGuard on_other(other_);
    y.add_(x);
    done.record();
  }
  done.block(side_);
  graph.capture_end();
  for (int step = 0; step < 3; ++step) {
    x.add_(1);
    graph.replay();
    y.mul_(2);
  }
  EXPECT_EQ(new_races(), 0);
  const CUDAStreamGuard on_other(other_);  // the captured stream itself has seen nothing of the launches
  y.add_(1);
  EXPECT_GE(new_races(), 1);
  c10::cuda::device_synchronize();
}

TEST_F(VirtualGpu, AWaitForTheDeviceCoversDestroyedStreams) {
  const Tensor x = at::ones({1000}, on_gpu);
  Tensor host = at::zeros({1000}, pinned);
  const auto use_on_another = [&](bool waits) {
    c10::cuda::device_synchronize();
    cudaStream_t stream = nullptr;
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    EXPECT_EQ(cudaMemsetAsync(x.mutable_data_ptr(), 0, 4000, stream), cudaSuccess);
    EXPECT_EQ(
        cudaMemcpyAsync(host.mutable_data_ptr(), x.const_data_ptr(), 4000, cudaMemcpyDeviceToHost, stream),
        cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    num_races();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // it has run, and the stream is deleted
    if (waits) c10::cuda::device_synchronize();
    x.add_(1);
  };
  host.fill_(7);
  use_on_another(true);
  EXPECT_EQ(new_races(), 0);
  EXPECT_EQ(host.const_data_ptr<float>()[999], 0) << "bytes that its copy brought";
  use_on_another(false);
  EXPECT_GE(new_races(), 1);
  c10::cuda::device_synchronize();
}

// New streams may get the addresses of destroyed ones.
TEST_F(VirtualGpu, StreamsThatAreDestroyedDuringACaptureStayLanesOfTheirOwn) {
  constexpr int num_streams = 30;
  const Tensor x = at::ones({1000}, on_gpu);
  c10::cuda::device_synchronize();
  cudaEvent_t begun = nullptr, done = nullptr;
  for (cudaEvent_t* event : {&begun, &done}) ASSERT_EQ(cudaEventCreate(event), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(side_, cudaStreamCaptureModeRelaxed), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(begun, side_), cudaSuccess);
  for (int i = 0; i < num_streams; ++i) {
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(stream, begun, 0), cudaSuccess);
    ASSERT_EQ(cudaMemsetAsync(x.mutable_data_ptr(), 0, 4000, stream), cudaSuccess);
    ASSERT_EQ(cudaEventRecord(done, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(side_, done, 0), cudaSuccess);
    ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    at::ones({1}, on_gpu);  // the scheduler looks for streams to delete
    num_races();
  }
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(side_, &graph), cudaSuccess);
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  ASSERT_EQ(cudaGraphLaunch(executable, side_), cudaSuccess);
  EXPECT_EQ(new_races(), num_streams - 1);
  side_.synchronize();
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  for (cudaEvent_t event : {begun, done}) cudaEventDestroy(event);
}

TEST_F(VirtualGpu, FindsThatAPinnedBufferIsReusedTooSoon) {
  const Tensor x = at::empty({1000}, on_gpu);
  Tensor host = at::ones({1000}, pinned);
  const auto reuse = [&](bool waits) {
    x.copy_(host, /*non_blocking=*/true);
    if (waits) main_.synchronize();
    host.fill_(2);
    main_.synchronize();
  };
  reuse(true);
  EXPECT_EQ(new_races(), 0);
  reuse(false);
  EXPECT_EQ(new_races(), 1);
}

TEST_F(VirtualGpu, AnotherThreadsWaitDoesNotHideAMissingOne) {
  const Tensor x = at::ones({1000}, on_gpu);
  c10::cuda::device_synchronize();
  const auto use_on_two_streams = [&](bool hands_over) {
    {
      const CUDAStreamGuard guard(side_);
      x.mul_(2);
    }
    at::cuda::CUDAEvent done;
    done.record(side_);
    std::atomic<bool> has_waited = false, ends = false;
    std::thread other([&] {
      done.synchronize();
      has_waited = true;
      while (!hands_over && !ends) std::this_thread::yield();
    });
    if (hands_over) other.join();
    while (!has_waited) std::this_thread::yield();
    x.add_(1);
    ends = true;
    if (!hands_over) other.join();
    c10::cuda::device_synchronize();
  };
  use_on_two_streams(true);
  EXPECT_EQ(new_races(), 0);
  use_on_two_streams(false);
  EXPECT_EQ(new_races(), 1);
}

TEST_F(VirtualGpu, FindsACollectiveOnTheWrongStream) {
  ncclUniqueId id;
  ncclComm_t communicator = nullptr;
  ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  ASSERT_EQ(ncclCommInitRank(&communicator, 1, id, 0), ncclSuccess);
  const Tensor x = at::ones({1000}, on_gpu);
  c10::cuda::device_synchronize();
  const auto add_and_reduce_on = [&](const at::cuda::CUDAStream& stream) {
    x.add_(1);
    float* const data = x.mutable_data_ptr<float>();
    EXPECT_EQ(ncclAllReduce(data, data, 1000, ncclFloat, ncclSum, communicator, stream), ncclSuccess);
    c10::cuda::device_synchronize();
  };
  add_and_reduce_on(main_);
  EXPECT_EQ(new_races(), 0);
  add_and_reduce_on(side_);
  EXPECT_GE(new_races(), 1);
  EXPECT_EQ(ncclCommDestroy(communicator), ncclSuccess);
}

TEST_F(VirtualGpu, CommunicatorsShrink) {
  ncclComm_t all[3], rest[2] = {};
  ASSERT_EQ(ncclCommInitAll(all, 3, nullptr), ncclSuccess);
  int excluded = 1;
  std::thread first([&] { ncclCommShrink(all[0], &excluded, 1, &rest[0], nullptr, NCCL_SHRINK_ABORT); });
  ASSERT_EQ(ncclCommShrink(all[2], &excluded, 1, &rest[1], nullptr, NCCL_SHRINK_ABORT), ncclSuccess);
  first.join();
  const Tensor x = at::tensor({1.f, 2.f}, on_gpu);
  c10::cuda::device_synchronize();
  for (const int i : {0, 1}) {
    int rank = -1;
    EXPECT_EQ(ncclCommUserRank(rest[i], &rank), ncclSuccess);
    EXPECT_EQ(rank, i);
    float* const data = x.mutable_data_ptr<float>() + i;
    EXPECT_EQ(ncclAllReduce(data, data, 1, ncclFloat, ncclSum, rest[i], i == 0 ? side_ : other_),
              ncclSuccess);
  }
  c10::cuda::device_synchronize();
  EXPECT_TRUE(x.cpu().equal(at::tensor({3.f, 3.f})));
  EXPECT_EQ(ncclAllReduce(nullptr, nullptr, 0, ncclFloat, ncclSum, all[0], nullptr), ncclRemoteError);
  for (ncclComm_t communicator : {all[0], all[1], all[2], rest[0], rest[1]}) ncclCommDestroy(communicator);
}

// ---- kernels

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
  launch_planted("blocks_share_a_result_kernel", out, in, 1);
  EXPECT_EQ(count("bytes_read", "blocks_share_a_result_kernel"), 4u);
  EXPECT_EQ(count("bytes_written", "blocks_share_a_result_kernel"), 256u);
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

using VirtualGpuDeathTest = VirtualGpu;

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

TEST_F(VirtualGpuDeathTest, OperationsThatAreNotWrittenEndTheProgramWithTheirNames) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const Tensor gates = at::zeros({2, 16}, on_gpu), state = at::zeros({2, 4}, on_gpu);
  EXPECT_DEATH(
      at::_thnn_fused_lstm_cell(gates, gates, state),
      "the operation aten::_thnn_fused_lstm_cell\\. is not supported. Write it in tests/virtual_gpu/kernels");
}

TEST_F(VirtualGpuDeathTest, FunctionsThatAreNotWrittenEndTheProgramWithTheirNames) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(ncclCommWindowRegister(nullptr, nullptr, 0, nullptr, 0),
               "ncclCommWindowRegister is not written");
}

}  // namespace

// Settings that a program reads once, so that each has a program of its own: visible and chosen devices, delays, seeds, limits of queues.

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <utility>

#include <c10/core/Event.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include "virtual_gpu_test.h"

namespace virtual_gpu_test {
namespace {

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

/// Launches of a thread of its own, which wait for a gate, and how many of them have returned. With `as_graphs`, all but the first are graphs.
class Launches {
 public:
  explicit Launches(int number, bool as_graphs = false) {
    cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
    cudaGraph_t graph = nullptr;
    cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed);
    cudaLaunchHostFunc(stream_, &count, this);
    cudaStreamEndCapture(stream_, &graph);
    cudaGraphInstantiate(&graph_, graph, 0);
    cudaGraphDestroy(graph);
    thread_ = std::thread([this, number, as_graphs] {
      cudaLaunchHostFunc(stream_, &wait, this);
      for (num_returned_ = 1; num_returned_ < number; ++num_returned_)
        as_graphs ? cudaGraphLaunch(graph_, stream_) : cudaLaunchHostFunc(stream_, &count, this);
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
  cudaGraphExec_t graph_ = nullptr;
  std::atomic<int> num_returned_ = 0, num_run_ = 0;
  std::atomic<bool> is_open_ = false;
  std::thread thread_;
};

[[noreturn]] void print_launches(bool as_graphs = false) {
  Launches launches(8, as_graphs);
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
  const Setting devices("VIRTUAL_GPU_DEVICES", "2"), chosen("VIRTUAL_GPU_DEVICES_PER_PROCESS", "2");
  EXPECT_EXIT(add_on_two_devices(), testing::ExitedWithCode(0),
              "error: Expected all tensors to be on the same device");
}

// ---- contexts of a process

struct OnDeviceOne {
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr, earlier = nullptr;
  void* memory = nullptr;
};
using CallOn = std::function<void(const OnDeviceOne&)>;

// The process chooses device 1. The call is a new thread's, whose device is 0.
[[noreturn]] void call_on_a_new_thread(const CallOn& call) {
  OnDeviceOne made;
  cudaSetDevice(1);
  cudaStreamCreateWithFlags(&made.stream, cudaStreamNonBlocking);
  cudaMalloc(&made.memory, 64);
  for (cudaEvent_t* event : {&made.earlier, &made.event}) {
    cudaEventCreate(event);
    cudaEventRecord(*event, made.stream);
  }
  cudaStreamSynchronize(made.stream);
  std::thread([&] {
    pthread_setname_np(pthread_self(), "planted");
    call(made);
  }).join();
  fprintf(stderr, "no second context;\n");
  _exit(0);
}

TEST(Contexts, ACallThatMakesASecondOneEndsTheProgram) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const Setting devices("VIRTUAL_GPU_DEVICES", "2");
  static char host[64];
  const std::pair<const char*, CallOn> calls[] = {
      {"cudaSetDevice\\(0\\)", [](const OnDeviceOne&) { cudaSetDevice(0); }},
      {"cudaMalloc",
       [](const OnDeviceOne&) {
         void* memory = nullptr;
         cudaMalloc(&memory, 64);
       }},
      {"cudaHostAlloc",
       [](const OnDeviceOne&) {
         void* memory = nullptr;
         cudaMallocHost(&memory, 64);
       }},
      {"cudaHostRegister", [](const OnDeviceOne&) { cudaHostRegister(host, sizeof host, 0); }},
      {"cudaMemsetAsync", [](const OnDeviceOne& made) { cudaMemsetAsync(made.memory, 0, 64, made.stream); }},
      {"cudaStreamQuery", [](const OnDeviceOne& made) { cudaStreamQuery(made.stream); }},
      {"cudaStreamWaitEvent",
       [](const OnDeviceOne& made) { cudaStreamWaitEvent(made.stream, made.event, 0); }},
      {"cudaEventRecord", [](const OnDeviceOne& made) { cudaEventRecord(made.event, made.stream); }},
      {"cudaEventDestroy", [](const OnDeviceOne& made) { cudaEventDestroy(made.event); }}};
  for (const auto& [name, call] : calls)
    EXPECT_DEATH(
        call_on_a_new_thread(call),
        std::string(name) +
            ".* on thread [0-9]+ \\('planted'\\) makes a context on device 0, .* has one on device 1\n.*"
            "\n    virtual_gpu_test\\+0x");
}

// It restores the thread's device by a call that makes a context there.
TEST(Contexts, AnEventOfLibTorchsThatEndsOnANewThreadMakesASecondOne) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const Setting devices("VIRTUAL_GPU_DEVICES", "2");
  const auto end_event = [](bool chooses) {
    call_on_a_new_thread([chooses](const OnDeviceOne&) {
      c10::Event event(c10::DeviceType::CUDA);
      {
        const c10::cuda::CUDAGuard on_device_one(1);
        event.record(at::cuda::getCurrentCUDAStream());
      }
      if (chooses) c10::cuda::set_device(1);
    });
  };
  EXPECT_DEATH(end_event(false), "cudaSetDevice\\(0\\) on thread");
  EXPECT_EXIT(end_event(true), testing::ExitedWithCode(0), "no second context;");
}

// CUDA 13's questions and waits for events make none.
TEST(Contexts, OneDeviceOnAllThreadsAndQuestionsMakeNoSecondOne) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto ask = [](const OnDeviceOne& made) {
    float ms = 0;
    int device = -1;
    EXPECT_EQ(cudaEventQuery(made.event), cudaSuccess);
    EXPECT_EQ(cudaEventSynchronize(made.event), cudaSuccess);
    EXPECT_EQ(cudaEventElapsedTime(&ms, made.earlier, made.event), cudaSuccess);
    EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
    EXPECT_EQ(device, 0);
    cudaSetDevice(1);
    cudaEventDestroy(made.event);
    _exit(testing::Test::HasFailure());
  };
  const Setting devices("VIRTUAL_GPU_DEVICES", "2");
  EXPECT_EXIT(call_on_a_new_thread(ask), testing::ExitedWithCode(0), "");
}

[[noreturn]] void work_on_the_first_and_choose_the_second() {
  void* memory = nullptr;
  cudaMalloc(&memory, 64);
  const cudaError_t error = cudaSetDevice(1);
  fprintf(stderr, "chosen: %s;\n", cudaGetErrorName(error));
  _exit(0);
}

TEST(Contexts, AProcessMayChooseAsManyDevicesAsTheSettingSays) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const Setting devices("VIRTUAL_GPU_DEVICES", "2");
  EXPECT_DEATH(work_on_the_first_and_choose_the_second(),
               "cudaSetDevice\\(1\\) .* context on device 1, .* has one on device 0");
  const Setting two("VIRTUAL_GPU_DEVICES_PER_PROCESS", "2");
  EXPECT_EXIT(work_on_the_first_and_choose_the_second(), testing::ExitedWithCode(0), "chosen: cudaSuccess;");
}

// ---- launches and recordings

TEST(Settings, ALaunchBeyondTheQueuesLimitWaits) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(print_launches(), testing::ExitedWithCode(0), "8 of 8 launches returned;");
  const Setting limit("VIRTUAL_GPU_QUEUE_LIMIT", "3");
  EXPECT_EXIT(print_launches(), testing::ExitedWithCode(0), "3 of 8 launches returned;");
  // A launch of a graph takes two places, and one more for each further stream in it.
  EXPECT_EXIT(print_launches(/*as_graphs=*/true), testing::ExitedWithCode(0), "2 of 8 launches returned;");
}

TEST(Settings, EachLaunchWaitsWhereLaunchesBlock) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(print_waits(), testing::ExitedWithCode(0), "launches: not done not done not done;");
  const Setting blocking("CUDA_LAUNCH_BLOCKING", "1");
  EXPECT_EXIT(print_waits(), testing::ExitedWithCode(0), "launches: done done done;");
  EXPECT_EXIT(print_launches(), testing::ExitedWithCode(0), "0 of 8 launches returned;");
}

// Whether the host has waited for the work of another stream when a launch returns: the kernel's first one, and its second.
[[noreturn]] void print_waits_of_launches() {
  const Tensor in = at::ones({64}, on_gpu), out = at::zeros({64}, on_gpu);
  c10::cuda::device_synchronize();
  const auto other = at::cuda::getStreamFromPool();
  std::string text;
  for (int i = 0; i < 2; ++i) {
    std::atomic<bool> is_done = false;
    cudaLaunchHostFunc(
        other,
        [](void* done) {
          std::this_thread::sleep_for(std::chrono::milliseconds(50));
          *static_cast<std::atomic<bool>*>(done) = true;
        },
        &is_done);
    launch_planted("sound_kernel", out, in, 1);
    text += is_done ? " done" : " not done";
    c10::cuda::device_synchronize();
  }
  fprintf(stderr, "other work:%s;\n", text.c_str());
  _exit(0);
}

TEST(Settings, TheFirstLaunchOfAKernelWaitsWhereKernelsAreLoadedLazily) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(print_waits_of_launches(), testing::ExitedWithCode(0), "other work: not done not done;");
  const Setting lazy("VIRTUAL_GPU_LAZY_LOADING", "1");
  EXPECT_EXIT(print_waits_of_launches(), testing::ExitedWithCode(0), "other work: done not done;");
}

// Whether a stream works while another one waits for a message that nobody sends, and has an event after it.
[[noreturn]] void print_work_beside_a_wait() {
  const Tensor message = at::zeros({64}, on_gpu), other = at::zeros({64}, on_gpu);
  c10::cuda::device_synchronize();
  cudaStream_t first = nullptr, second = nullptr;
  for (cudaStream_t* stream : {&first, &second}) cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking);
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  ncclComm_t alone = nullptr;
  ncclCommInitRank(&alone, 1, id, 0);
  ncclRecv(message.mutable_data_ptr(), 64, ncclFloat, 0, alone, first);
  cudaEvent_t event = nullptr;
  cudaEventCreate(&event);
  cudaEventRecord(event, first);
  cudaMemsetAsync(other.mutable_data_ptr(), 0, 4, second);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  fprintf(stderr, "beside a wait: %s;\n", cudaStreamQuery(second) == cudaSuccess ? "work" : "no work");
  ncclCommAbort(alone);
  c10::cuda::device_synchronize();
  _exit(0);
}

TEST(Settings, StreamsThatShareAQueueHoldEachOtherUp) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(print_work_beside_a_wait(), testing::ExitedWithCode(0), "beside a wait: work;");
  const Setting queues("VIRTUAL_GPU_QUEUES", "1");
  EXPECT_EXIT(print_work_beside_a_wait(), testing::ExitedWithCode(0), "beside a wait: no work;");
}

[[noreturn]] void print_recorded_copies() {
  void *device = nullptr, *host = nullptr;
  cudaMalloc(&device, 64);
  cudaMallocHost(&host, 64);
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  std::string text;
  for (const bool reads_host : {false, true}) {
    cudaGraph_t graph = nullptr;
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed);
    void *const to = reads_host ? device : host, *const from = reads_host ? host : device;
    text += std::string(" ") + cudaGetErrorName(cudaMemcpyAsync(to, from, 64, cudaMemcpyDefault, stream));
    cudaStreamEndCapture(stream, &graph);
    text += graph ? " recorded" : " refused";
  }
  fprintf(stderr, "copies:%s;\n", text.c_str());
  _exit(0);
}

TEST(Settings, ARecordedCopyThatReadsTheHostsMemoryMayBeRefused) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(print_recorded_copies(), testing::ExitedWithCode(0),
              "copies: cudaSuccess recorded cudaSuccess recorded;");
  const Setting refuses("VIRTUAL_GPU_GRAPHS_READ_HOST", "0");
  EXPECT_EXIT(print_recorded_copies(), testing::ExitedWithCode(0),
              "a graph is recorded that reads 64 bytes of the host's memory\ncopies: cudaSuccess recorded "
              "cudaErrorStreamCaptureUnsupported refused;");
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

}  // namespace
}  // namespace virtual_gpu_test

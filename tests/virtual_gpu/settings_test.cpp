// Settings that a program reads once, so that each has a program of its own: visible devices, delays, seeds, limits of queues.

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>

#include <cuda_runtime_api.h>

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
  const Setting devices("VIRTUAL_GPU_DEVICES", "2");
  EXPECT_EXIT(add_on_two_devices(), testing::ExitedWithCode(0),
              "error: Expected all tensors to be on the same device");
}

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

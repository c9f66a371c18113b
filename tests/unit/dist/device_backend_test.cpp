// Streams and events are no-ops on the CPU. The CUDA plugin isn't opened without a GPU, but can be loaded.

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <filesystem>

#include <ATen/ATen.h>

#include "dist/device_backend.h"

namespace titan::dist {
namespace {

TEST(Stream, DoesNothingOnTheCpu) {
  const Stream current = Stream::current(at::kCPU), other = Stream::create(at::kCPU, Priority::High);
  EXPECT_FALSE(current.on_device());
  EXPECT_EQ(current, other);
  const StreamGuard guard(other);
  Event event = current.record();
  other.wait(event);
  other.wait(current);
  other.keep_alive(at::zeros({2}));
  other.synchronize();
  event.synchronize();
  EXPECT_TRUE(event.done());
  EXPECT_FALSE(Stream::create(at::kMeta).on_device());
}

TEST(StreamOnGpu, OrdersWork) {
  if (!open_cuda_plugin()) GTEST_SKIP() << "no GPU is visible";
  const at::Device gpu(at::kCUDA, 0);
  const Stream main = Stream::current(gpu), side = Stream::create(gpu, Priority::High);
  at::Tensor a = at::ones({1 << 20}, gpu);
  side.wait(main);
  {
    const StreamGuard guard(side);
    EXPECT_EQ(Stream::current(gpu), side);
    a.mul_(2);
  }
  side.keep_alive(a);
  main.wait(side);
  EXPECT_EQ(a.sum().item<double>(), 2.0 * (1 << 20));
}

TEST(CudaPlugin, IsntOpenedWithoutAGpu) {
  if (gpu_visible()) GTEST_SKIP() << "a GPU is visible";
  EXPECT_EQ(open_cuda_plugin(), nullptr);
  EXPECT_EQ(device_backend(), nullptr);
}

TEST(CudaPlugin, LoadsAndCountsDevices) {
  const auto path = std::filesystem::path(TITAN_BINARY_DIR) / "lib" / "libtitan_cuda.so";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << "the plugin isn't built";
  // In a process of its own: CUDA's library stays loaded, and the other tests run without it.
  EXPECT_EXIT(
      {
        void* library = dlopen(path.c_str(), RTLD_NOW);
        if (!library) std::fprintf(stderr, "%s\n", dlerror());
        auto* entry =
            library ? reinterpret_cast<DeviceBackend* (*)()>(dlsym(library, "titan_cuda_plugin")) : nullptr;
        std::fprintf(stderr, "%d devices\n", entry ? entry()->num_devices() : -1);
        _exit(entry && entry()->device_type() == at::kCUDA && (entry()->num_devices() > 0 || !gpu_visible())
                  ? 0
                  : 1);
      },
      ::testing::ExitedWithCode(0), "[0-9]+ devices");
}

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(DeviceChoice, WarnsAboutAGpuThatStaysUnused) {
  const std::string here = "/proc/self/exe", nowhere = "/nowhere/libtitan_cuda.so", failure = "old driver";
  EXPECT_THAT(unused_gpu_warning("auto", true, nowhere, ""),
              AllOf(HasSubstr(nowhere), HasSubstr("nvcc"), HasSubstr("training.device = \"cpu\"")));
  EXPECT_EQ(unused_gpu_warning("auto", true, here, ""), "");
  EXPECT_EQ(unused_gpu_warning("auto", false, nowhere, ""), "");
  EXPECT_EQ(unused_gpu_warning("cpu", true, nowhere, ""), "");
  EXPECT_THAT(unused_gpu_warning("auto", true, here, failure), HasSubstr(failure));
  EXPECT_EQ(unused_gpu_warning("cpu", true, here, failure), "");
}

}  // namespace
}  // namespace titan::dist

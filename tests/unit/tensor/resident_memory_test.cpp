#include "tensor/memory.h"

#include <cstdint>
#include <fstream>
#include <string>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace titan {
namespace {

constexpr int64_t kLarge = (int64_t{5} << 20) + 3;  // elements of 4 bytes, a bit more than ten huge pages

// Whether one of the process's mappings contains this address.
bool is_mapped(const void* address) {
  std::ifstream maps("/proc/self/maps");
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  for (std::string line; std::getline(maps, line);) {
    const size_t dash = line.find('-');
    const uintptr_t begin = std::stoull(line, nullptr, 16);
    const uintptr_t end = std::stoull(line.substr(dash + 1), nullptr, 16);
    if (begin <= wanted && wanted < end) return true;
  }
  return false;
}

TEST(ResidentMemory, IsZeroAndWritable) {
  const at::Tensor tensor = resident_zeros({kLarge / 7, 7}, at::kFloat);
  EXPECT_EQ(tensor.sizes(), at::IntArrayRef({kLarge / 7, 7}));
  EXPECT_TRUE(tensor.is_contiguous());
  EXPECT_EQ(tensor.count_nonzero().item<int64_t>(), 0);
  tensor.fill_(1);
  EXPECT_EQ(tensor.sum().item<double>(), static_cast<double>(tensor.numel()));
}

TEST(ResidentMemory, SupportsGradients) {
  const at::Tensor leaf = resident_zeros({kLarge}, at::kFloat).set_requires_grad(true);
  (leaf * 3).sum().backward();
  EXPECT_TRUE(leaf.grad().eq(3).all().item<bool>());
  EXPECT_TRUE(resident_empty({3}, at::kLong).copy_(at::ones({3}, at::kLong)).eq(1).all().item<bool>());
}

TEST(ResidentMemory, LeavesSmallBlocksAndOtherDevicesToLibTorch) {
  EXPECT_EQ(resident_zeros({3, 5}, at::kDouble).sum().item<double>(), 0);
  EXPECT_EQ(resident_zeros({0}, at::kFloat).numel(), 0);
  EXPECT_TRUE(resident_zeros({kLarge}, at::TensorOptions(at::kFloat).device(at::kMeta)).is_meta());
}

#if !defined(__SANITIZE_ADDRESS__)
TEST(ResidentMemory, MapsLargeBlocksAtHugePagesAndUnmapsThem) {
  const char* begin = nullptr;
  {
    const at::DataPtr memory = resident_memory(kLarge * 4, at::kCPU);
    begin = static_cast<const char*>(memory.get());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(begin) % (2 << 20), 0u);
    EXPECT_TRUE(is_mapped(begin));
    EXPECT_TRUE(is_mapped(begin + kLarge * 4 - 1));
  }
  EXPECT_FALSE(is_mapped(begin));
}
#endif

}  // namespace
}  // namespace titan

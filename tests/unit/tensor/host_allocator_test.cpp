#include "tensor/memory.h"

#include <sys/resource.h>

#include <fstream>
#include <new>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

namespace titan {
namespace {

constexpr int64_t kMiB = 1 << 20;

// Installed for the whole program, so its other tests use it, too.
class HostAllocator : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { install_host_allocator(); }
  static at::Tensor block(int64_t bytes) { return at::empty({bytes}, at::kByte); }
};

TEST_F(HostAllocator, ReusesAFreedBlockForTheSameSize) {
  const void* memory = block(3 * kMiB).data_ptr();
  const size_t mappings = host_memory_stats().num_mappings;
  const at::Tensor again = block(3 * kMiB), other = block(3 * kMiB);
  EXPECT_EQ(again.data_ptr(), memory);
  EXPECT_NE(other.data_ptr(), memory);
  EXPECT_EQ(host_memory_stats().num_mappings, mappings + 1);
  again.fill_(7);
  EXPECT_EQ(other.fill_(1).sum().item<int64_t>(), 3 * kMiB);
}

TEST_F(HostAllocator, DoesntUseALargeBlockForASmallOne) {
  const void* memory = block(64 * kMiB).data_ptr();
  EXPECT_NE(block(2 * kMiB).data_ptr(), memory);
  EXPECT_EQ(block(60 * kMiB).data_ptr(), memory) << "it fills nine tenths";
}

TEST_F(HostAllocator, StepsAfterTheFirstMapNothing) {
  const auto step = [] {
    std::vector<at::Tensor> kept;
    for (int64_t layer = 0; layer < 8; ++layer) {
      kept.push_back(block(6 * kMiB + layer));
      const at::Tensor passing = block(17 * kMiB);
      kept.push_back(block(2 * kMiB));
    }
    while (!kept.empty()) {
      const at::Tensor gradient = block(6 * kMiB);
      kept.pop_back();
    }
  };
  step();
  const size_t mappings = host_memory_stats().num_mappings;
  for (int i = 0; i < 3; ++i) step();
  EXPECT_EQ(host_memory_stats().num_mappings, mappings);
}

TEST_F(HostAllocator, KeepsABoundedAmount) {
  for (int64_t size = 100; size < 1000; size += 20)
    block(size * kMiB);  // untouched, so it occupies no memory
  const HostMemoryStats stats = host_memory_stats();
  EXPECT_EQ(stats.in_use_bytes, 0u);
  EXPECT_LE(stats.kept_bytes, stats.peak_in_use_bytes + stats.peak_in_use_bytes / 16 + 64 * kMiB);
  EXPECT_GE(stats.kept_bytes, static_cast<size_t>(900 * kMiB)) << "at least the last one";
}

int64_t mapped_bytes() {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * 4096;
}

/// Limits the bytes that this process can map additionally while the object exists.
class AddressLimit {
 public:
  explicit AddressLimit(int64_t more) {
    ::getrlimit(RLIMIT_AS, &before_);
    rlimit limit = before_;
    limit.rlim_cur = static_cast<rlim_t>(mapped_bytes() + more);
    ::setrlimit(RLIMIT_AS, &limit);
  }
  ~AddressLimit() { ::setrlimit(RLIMIT_AS, &before_); }
  AddressLimit(const AddressLimit&) = delete;
  AddressLimit& operator=(const AddressLimit&) = delete;

 private:
  rlimit before_{};
};

TEST_F(HostAllocator, GivesKeptBlocksBackBeforeMemoryRunsOut) {
  {
    const at::Tensor one = block(1200 * kMiB), two = block(1200 * kMiB);  // untouched
  }
  ASSERT_GE(host_memory_stats().kept_bytes, static_cast<size_t>(1200 * kMiB));
  const AddressLimit limit(64 * kMiB);
  const at::Tensor more = block(120 * kMiB);  // no kept block has its size
  EXPECT_EQ(host_memory_stats().in_use_bytes, static_cast<size_t>(120 * kMiB));
  EXPECT_EQ(host_memory_stats().kept_bytes, 0u);
  const HostMemoryStats before = host_memory_stats();
  EXPECT_THROW(block(100'000 * kMiB), std::bad_alloc);
  EXPECT_EQ(host_memory_stats().in_use_bytes, before.in_use_bytes);
  EXPECT_EQ(host_memory_stats().peak_in_use_bytes, before.peak_in_use_bytes);
}

TEST_F(HostAllocator, FreesRawPointers) {
  for (const size_t bytes : {size_t{100}, static_cast<size_t>(3 * kMiB)}) {
    auto* memory = static_cast<char*>(c10::GetCPUAllocator()->raw_allocate(bytes));
    memory[0] = memory[bytes - 1] = 1;
    c10::GetCPUAllocator()->raw_deallocate(memory);
  }
  EXPECT_EQ(host_memory_stats().in_use_bytes, 0u);
}

TEST_F(HostAllocator, DoesntCountSmallBlocks) {
  const HostMemoryStats before = host_memory_stats();
  const at::Tensor small = block(kMiB - 1), none = block(0);
  EXPECT_EQ(small.fill_(1).sum().item<int64_t>(), kMiB - 1);
  EXPECT_EQ(host_memory_stats().in_use_bytes, before.in_use_bytes);
}

}  // namespace
}  // namespace titan

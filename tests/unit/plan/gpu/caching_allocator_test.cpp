#include "plan/gpu/caching_allocator.h"

#include <gtest/gtest.h>

namespace titan::plan {
namespace {

constexpr int64_t kMiB = 1 << 20;

TEST(CachingAllocator, RoundsToBlocksAndSegments) {
  CachingAllocator allocator({.device_bytes = 1024 * kMiB});
  allocator.allocate(1, 0);
  EXPECT_EQ(allocator.allocated().now, 512);
  EXPECT_EQ(allocator.reserved().now, 2 * kMiB);
  allocator.allocate(kMiB + 1, 0);
  EXPECT_EQ(allocator.allocated().now, kMiB + 1024);
  EXPECT_EQ(allocator.reserved().now, 22 * kMiB);
}

TEST(CachingAllocator, TakesTheSmallestFreeBlockOfTheStream) {
  CachingAllocator allocator({.device_bytes = 1024 * kMiB});
  const uintptr_t large = allocator.allocate(40 * kMiB, 0);
  allocator.allocate(2 * kMiB, 0);
  const uintptr_t small = allocator.allocate(30 * kMiB, 0);
  allocator.allocate(2 * kMiB, 0);
  allocator.free(large);
  allocator.free(small);
  EXPECT_EQ(allocator.allocate(30 * kMiB, 0), small);
  EXPECT_NE(allocator.allocate(30 * kMiB, 1), large);
}

TEST(CachingAllocator, MergesNeighborsThatAreFree) {
  CachingAllocator allocator({.device_bytes = 1024 * kMiB});
  const uintptr_t first = allocator.allocate(20 * kMiB, 0), second = allocator.allocate(20 * kMiB, 0);
  allocator.free(second);
  allocator.free(first);
  EXPECT_EQ(allocator.allocate(40 * kMiB, 0), first);
  EXPECT_EQ(allocator.reserved().peak, 40 * kMiB);
}

TEST(CachingAllocator, KeepsBlocksThatOtherStreamsUseUntilTheNextRequest) {
  CachingAllocator allocator({.device_bytes = 1024 * kMiB});
  const uintptr_t block = allocator.allocate(kMiB, 0);
  allocator.record_stream(block, 1);
  allocator.free(block);
  EXPECT_EQ(allocator.allocated().now, 0);
  EXPECT_EQ(allocator.active().now, kMiB);
  allocator.allocate(512, 0);
  EXPECT_EQ(allocator.active().now, 512);
}

TEST(CachingAllocator, GivesGraphsMemoryOfTheirOwn) {
  CachingAllocator allocator({.device_bytes = 1024 * kMiB});
  allocator.free(allocator.allocate(20 * kMiB, 0));
  allocator.empty_cache();
  EXPECT_EQ(allocator.reserved().now, 0);
  allocator.begin_recording([](int64_t stream) { return stream == 0; });
  const uintptr_t recorded = allocator.allocate(20 * kMiB, 0), shared = allocator.allocate(20 * kMiB, 0);
  allocator.record_stream(shared, 1);
  allocator.free(recorded);
  allocator.free(shared);
  EXPECT_EQ(allocator.allocate(20 * kMiB, 0), recorded);
  allocator.allocate(20 * kMiB, 0);
  EXPECT_EQ(allocator.reserved().now, 60 * kMiB)
      << "a block that another stream has used stays until the end";
  allocator.free(recorded);
  allocator.end_recording();
  allocator.allocate(20 * kMiB, 0);
  EXPECT_EQ(allocator.reserved().now, 80 * kMiB);
  allocator.begin_recording([](int64_t stream) { return stream == 0; });
  allocator.allocate(20 * kMiB, 0);
  EXPECT_EQ(allocator.reserved().now, 80 * kMiB) << "graphs share their memory";
}

TEST(CachingAllocator, TellsWhenTheDeviceIsFull) {
  CachingAllocator allocator({.device_bytes = 100 * kMiB});
  EXPECT_NE(allocator.allocate(80 * kMiB, 0), 0U);
  EXPECT_EQ(allocator.allocate(40 * kMiB, 0), 0U);
  EXPECT_EQ(allocator.num_out_of_memory(), 1);
}

}  // namespace
}  // namespace titan::plan

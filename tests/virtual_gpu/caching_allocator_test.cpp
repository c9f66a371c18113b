// The model of LibTorch's caching allocator (src/plan/gpu/caching_allocator.h) against the real one, on a virtual GPU: the same random requests,
// frees, uses by other streams and recordings of graphs, and the same bytes after each.

#include <random>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "plan/gpu/caching_allocator.h"

namespace titan::plan {
namespace {

namespace real = c10::cuda::CUDACachingAllocator;

constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
constexpr int kNumStreams = 3;

struct InUse {
  c10::DataPtr data;
  uintptr_t address = 0;
};

// Sizes of all orders of magnitude, and often the same ones, as a model's are.
int64_t some_size(std::mt19937& random) {
  static constexpr int64_t usual[] = {1,       512,      4096,     1 << 20,  (1 << 20) + 1,
                                      5 << 20, 10 << 20, 33 << 20, 100 << 20};
  if (random() % 2 == 0) return usual[random() % std::size(usual)];
  return 1 + static_cast<int64_t>(random() % (int64_t{1} << (4 + random() % 24)));
}

void expect_equal(const CachingAllocator& model, int step) {
  const auto stats = real::getDeviceStats(0);
  ASSERT_EQ(model.allocated().now, stats.allocated_bytes[kAll].current) << "step " << step;
  ASSERT_EQ(model.active().now, stats.active_bytes[kAll].current) << "step " << step;
  ASSERT_EQ(model.reserved().now, stats.reserved_bytes[kAll].current) << "step " << step;
  ASSERT_EQ(model.reserved().peak, stats.reserved_bytes[kAll].peak) << "step " << step;
}

/// Recordings of CUDA graphs in both allocators. The first two streams take part.
class Recordings {
 public:
  Recordings(unsigned number, const std::vector<c10::cuda::CUDAStream>& streams, CachingAllocator& model)
      : streams_(streams), model_(model), pool_(kFirstPool + number, 0) {}
  ~Recordings() {
    if (is_recording_) toggle();
    for (; num_ > 0; --num_) real::releasePool(0, pool_);
  }

  void toggle() {
    if (std::exchange(is_recording_, !is_recording_)) {
      real::endAllocateToPool(0, pool_);
      return model_.end_recording();
    }
    ++num_;
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    real::emptyCache();
    real::beginAllocateToPool(0, pool_, [this](cudaStream_t stream) {
      return stream == streams_[0].stream() || stream == streams_[1].stream();
    });
    model_.empty_cache();
    model_.begin_recording([](int64_t stream) { return stream < 2; });
  }

 private:
  static constexpr c10::CaptureId_t kFirstPool = 1000;  // a pool that was released isn't made again

  const std::vector<c10::cuda::CUDAStream>& streams_;
  CachingAllocator& model_;
  c10::MempoolId_t pool_;
  bool is_recording_ = false;
  int num_ = 0;
};

void compare(unsigned seed, bool records) {
  at::globalContext().lazyInitDevice(c10::kCUDA);
  c10::CachingAllocator::setAllocatorSettings("expandable_segments:True");
  real::emptyCache();
  real::resetPeakStats(0);
  size_t free = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  CachingAllocator model({.device_bytes = static_cast<int64_t>(total)});
  std::vector<c10::cuda::CUDAStream> streams = {c10::cuda::getDefaultCUDAStream()};
  while (streams.size() < kNumStreams) streams.push_back(c10::cuda::getStreamFromPool());
  std::mt19937 random(seed);
  Recordings recordings(seed, streams, model);
  std::vector<InUse> in_use;
  for (int step = 0; step < 3000; ++step) {
    if (records && step % 430 == 429) recordings.toggle();
    const bool frees = !in_use.empty() && (in_use.size() > 120 || random() % 2 == 0);
    if (frees) {
      std::swap(in_use[random() % in_use.size()], in_use.back());
      model.free(in_use.back().address);
      in_use.pop_back();
    } else {
      const auto stream = random() % kNumStreams;
      const int64_t bytes = some_size(random);
      // The model takes other streams for done at the next request.
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      const c10::cuda::CUDAStreamGuard guard(streams[stream]);
      in_use.push_back({real::get()->allocate(static_cast<size_t>(bytes)),
                        model.allocate(bytes, static_cast<int64_t>(stream))});
      if (random() % 4 == 0) {
        const auto other = random() % kNumStreams;
        real::recordStream(in_use.back().data, streams[other]);
        model.record_stream(in_use.back().address, static_cast<int64_t>(other));
      }
    }
    expect_equal(model, step);
    if (::testing::Test::HasFatalFailure()) return;
  }
  while (!in_use.empty()) {
    model.free(in_use.back().address);
    in_use.pop_back();
  }
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  real::emptyCache();
  model.empty_cache();
  expect_equal(model, -1);
}

TEST(CachingAllocator, GivesTheBytesOfLibTorchs) {
  for (unsigned seed = 1; seed <= 5 && !HasFatalFailure(); ++seed) compare(seed, /*records=*/false);
}

TEST(CachingAllocator, GivesTheBytesOfLibTorchsWhereGraphsAreRecorded) {
  for (unsigned seed = 1; seed <= 5 && !HasFatalFailure(); ++seed) compare(seed, /*records=*/true);
}

}  // namespace
}  // namespace titan::plan

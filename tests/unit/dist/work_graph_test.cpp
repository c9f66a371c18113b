#include "dist/work_graph.h"

#include <memory>

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dist/device_backend.h"
#include "dist/stream.h"
#include "titan/core/error.h"

namespace titan::dist {
namespace {

using ::testing::HasSubstr;

const at::Device kGpu(at::kCUDA, 0);

class WorkGraphOnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!open_cuda_plugin()) GTEST_SKIP() << "no GPU is visible";
    stream_ = Stream::create(kGpu);
    guard_ = std::make_unique<StreamGuard>(stream_);
  }
  at::Tensor numbers(float value) const {
    return at::full({1000}, value, at::dtype(at::kFloat).device(kGpu));
  }
  static float first_of(const at::Tensor& tensor) { return tensor.cpu()[0].item<float>(); }

  Stream stream_;
  std::unique_ptr<StreamGuard> guard_;
};

TEST_F(WorkGraphOnGpu, DoesNothingUntilItIsLaunchedThenTheSameEachTime) {
  const at::Tensor sum = numbers(0), one = numbers(1);
  WorkGraph graph(kGpu);
  graph.record([&] { sum.add_(one); });
  EXPECT_EQ(first_of(sum), 0);
  for (const float expected : {1.0F, 2.0F, 3.0F}) {
    graph.launch();
    EXPECT_EQ(first_of(sum), expected);
  }
  one.fill_(10);  // a recording has addresses, not numbers
  graph.launch();
  EXPECT_EQ(first_of(sum), 13);
}

TEST_F(WorkGraphOnGpu, StreamsTakePartByWaiting) {
  const Stream side = Stream::create(kGpu);
  const at::Tensor from = numbers(1), to = numbers(0);
  const Event before = side.record();
  WorkGraph graph(kGpu);
  Event in_graph;
  graph.record([&] {
    EXPECT_TRUE(stream_.is_recorded());
    EXPECT_FALSE(side.is_recorded());
    from.add_(1);
    side.wait(stream_);
    EXPECT_TRUE(side.is_recorded());
    {
      const StreamGuard on_side(side);
      side.wait(before);  // is over, in every launch
      to.copy_(from);
    }
    in_graph = side.record();
    EXPECT_FALSE(in_graph.done());
    stream_.wait(in_graph);
    to.add_(to);
  });
  EXPECT_FALSE(side.is_recorded());
  graph.launch();
  EXPECT_EQ(first_of(to), 4);
  graph.launch();
  // Work outside waits for the launch.
  side.wait(in_graph);
  const StreamGuard on_side(side);
  EXPECT_EQ(first_of(to), 6);
  in_graph.synchronize();
  EXPECT_TRUE(in_graph.done());
}

TEST_F(WorkGraphOnGpu, KeepsResultsThatAreReferredToWhileOtherGraphsRun) {
  const at::Tensor from = numbers(1);
  at::Tensor doubled, squared;
  WorkGraph doubling(kGpu), squaring(kGpu);
  doubling.record([&] { doubled = from.add(from).add_(0); });
  squaring.record([&] { squared = from.mul(from).mul_(1).add(0); });
  for (const float value : {3.0F, 5.0F}) {
    from.fill_(value);
    doubling.launch();
    squaring.launch();
    EXPECT_EQ(first_of(doubled), 2 * value);
    EXPECT_EQ(first_of(squared), value * value);
    from.fill_(7);
    squaring.launch();
    EXPECT_EQ(first_of(doubled), 2 * value);
  }
}

TEST_F(WorkGraphOnGpu, ErrorsOfTheCallerPassThrough) {
  WorkGraph graph(kGpu);
  EXPECT_THAT([&] { graph.record([] { throw Error("no such layer"); }); },
              ::testing::ThrowsMessage<Error>(HasSubstr("no such layer")));
  const at::Tensor one = numbers(1);
  WorkGraph next(kGpu);
  next.record([&] { one.add_(1); });
  next.launch();
  EXPECT_EQ(first_of(one), 2);
}

TEST_F(WorkGraphOnGpu, SaysWhatCantBeRecorded) {
  const at::Tensor one = numbers(1);
  WorkGraph graph(kGpu);
  EXPECT_THAT([&] { graph.record([&] { one.sum().item<float>(); }); },
              ::testing::ThrowsMessage<Error>(HasSubstr("this work can't be recorded: ")));
  EXPECT_FALSE(stream_.is_recorded());
  one.add_(1);
  EXPECT_EQ(first_of(one), 2);
}

// LibTorch would leave its allocator and its random numbers as they are during a recording.
TEST_F(WorkGraphOnGpu, TheDeviceIsUsableAfterAFailedRecording) {
  const auto active_bytes = [] {
    device_backend()->reset_peak_memory(0);
    return device_backend()->memory(0).peak_active_bytes;
  };
  const at::Tensor one = numbers(1);
  const int64_t before = active_bytes();
  {
    WorkGraph graph(kGpu);
    EXPECT_THROW(graph.record([&] { one.sum().item<float>(); }), Error);
  }
  EXPECT_GT(first_of(at::rand_like(one).add_(1)), 0);
  Stream::create(kGpu).keep_alive(numbers(2));
  c10::impl::VirtualGuardImpl(at::kCUDA).synchronizeDevice(0);
  numbers(3);  // whoever asks for memory finds what has come back
  EXPECT_EQ(active_bytes(), before);
  WorkGraph next(kGpu);
  next.record([&] { one.add_(1); });
  next.launch();
  EXPECT_EQ(first_of(one), 2);
}

TEST(WorkGraph, NeedsAGpu) {
  EXPECT_THAT([] { const WorkGraph graph(at::Device(at::kCPU)); },
              ::testing::ThrowsMessage<Error>(HasSubstr("work graphs need a GPU, not cpu")));
}

}  // namespace
}  // namespace titan::dist

// The memory of a GPU, and the host's memory that it copies to.

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string_view>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "dist/device_backend.h"
#include "dist/stream.h"
#include "distributed/checkpoint_saver.h"
#include "distributed/world.h"
#include "float8/products.h"
#include "parallel/fsdp/comm_context.h"
#include "parallel/fsdp/param_group.h"
#include "titan/checkpoint/checkpointer.h"

namespace titan {
namespace {

using testing::device;
using testing::options_of;
using testing::world;

constexpr int64_t kMiB = 1 << 20;

dist::DeviceMemory memory() { return dist::device_backend()->memory(device().index()); }

class DeviceMemoryTest : public ::testing::Test {
  void SetUp() override {
    if (!device().is_cuda()) GTEST_SKIP() << "needs a GPU";
  }
};

/// One tensor on the GPU.
class OneTensor : public checkpoint::Stateful {
 public:
  explicit OneTensor(int64_t num_bytes) {
    tensor_.local = at::zeros({num_bytes / 4}, options_of(at::kFloat));
  }
  checkpoint::ObjectState state() override {
    checkpoint::ObjectState state;
    tensor_.global_shape = tensor_.box.length = tensor_.local.sizes().vec();
    tensor_.box.offset = {0};
    state.tensors.push_back({"tensor", tensor_});
    return state;
  }
  void loaded(const std::string&) override {}

 private:
  DTensor tensor_;
};

// LibTorch's allocator would take 16 MiB for 9.
TEST_F(DeviceMemoryTest, APlanLocksThePagesThatTheSavesUse) {
  const testing::SharedFolder folder;
  OneTensor tensor(9 * kMiB);
  const int64_t before = memory().page_locked_bytes;
  {
    checkpoint::Checkpointer checkpointer(world(), {},
                                          {.folder = folder / "run", .async = checkpoint::AsyncMode::Copied});
    checkpointer.add("model", tensor);
    checkpointer.plan();
    for (int i = 0; i < 1000 && memory().page_locked_bytes == before; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    EXPECT_EQ(memory().page_locked_bytes - before, 10 * kMiB);
    for (int64_t step = 1; step <= 2; ++step) checkpointer.save(step);
    checkpointer.finish();
    EXPECT_EQ(memory().page_locked_bytes - before, 10 * kMiB);
  }
  EXPECT_EQ(memory().page_locked_bytes, before);
}

// The rest of the device is in use, so only the pool can help.
TEST_F(DeviceMemoryTest, AnAllocationThatWouldFailTakesIdleBuffersFromThePool) {
  constexpr int64_t kBytes = 64 * kMiB;
  const auto try_empty = [](int64_t bytes) {
    try {
      return at::empty({bytes}, options_of(at::kByte));
    } catch (const c10::OutOfMemoryError&) {
      return at::Tensor();
    }
  };
  fsdp::BufferPool pool(device());
  const dist::Stream other = dist::Stream::create(device());
  at::Tensor buffer = pool.acquire(kBytes, at::kByte, other);
  std::vector<at::Tensor> rest;
  for (int64_t size = memory().total_bytes; size > 0;)
    if (at::Tensor tensor = try_empty(size); tensor.defined())
      rest.push_back(std::move(tensor));
    else
      size = size == kBytes ? 0 : std::max(size - 1024 * kMiB, kBytes);
  ASSERT_FALSE(try_empty(kBytes).defined()) << "the device isn't full";
  {
    const dist::StreamGuard on_other(other);
    buffer.fill_(1);
  }
  pool.release(std::move(buffer), other);
  EXPECT_TRUE(try_empty(kBytes).defined());
  EXPECT_EQ(pool.num_allocations(), 1);
}

// A block of 80 MiB doesn't fit into a segment that was made for 60. An expandable one grows.
TEST_F(DeviceMemoryTest, SegmentsExpandUnlessTheUserSaysOtherwise) {
  const char* settings = std::getenv("PYTORCH_CUDA_ALLOC_CONF");
  const bool are_fixed = settings && std::string_view(settings) == "expandable_segments:False";
  const int64_t before = memory().reserved_bytes;
  for (const int64_t size : {60, 80}) at::empty({size * kMiB}, options_of(at::kByte));
  const int64_t more = memory().reserved_bytes - before;
  if (are_fixed) {
    EXPECT_GE(more, 140 * kMiB);
  } else {
    EXPECT_LE(more, 100 * kMiB);
  }
}

TEST_F(DeviceMemoryTest, AFailedRequestShowsTheBlocksInUse) {
  const at::Tensor tensor = at::ones({4 * kMiB}, options_of(at::kByte));
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  int64_t requested = 0, found = 0;
  dist::device_backend()->watch_out_of_memory([&](const dist::OutOfMemory& failure) {
    requested = failure.requested_bytes;
    for (const auto& block : failure.blocks)
      if (block.begin <= address && address < block.begin + static_cast<uintptr_t>(block.bytes)) ++found;
  });
  const int64_t too_many = 2 * memory().total_bytes;
  EXPECT_THROW(at::empty({too_many}, options_of(at::kByte)), c10::OutOfMemoryError);
  dist::device_backend()->watch_out_of_memory({});
  EXPECT_GE(requested, too_many);
  EXPECT_EQ(found, 1);
}

TEST_F(DeviceMemoryTest, ThePoolKeepsABufferUntilItsStreamHasWaitedForTheLastUser) {
  fsdp::BufferPool pool(device());
  const dist::Stream home = dist::Stream::current(device()), other = dist::Stream::create(device());
  const int64_t before = memory().allocated_bytes;
  pool.release(pool.acquire(4 * kMiB, at::kByte, home), home);
  EXPECT_EQ(memory().allocated_bytes, before);
  for (int use = 0; use < 2; ++use) {
    pool.release(pool.acquire(4 * kMiB, at::kByte, other), other);
    EXPECT_EQ(memory().allocated_bytes - before, 4 * kMiB);
  }
  EXPECT_EQ(pool.num_allocations(), 2);
  home.wait(other);
  pool.hand_over();
  EXPECT_EQ(memory().allocated_bytes, before);
}

/// A group of one parameter whose forward was on another stream, which still has much to do.
struct GroupOfBusyStream {
  GroupOfBusyStream() {
    forward.wait(dist::Stream::current(device()));
    const dist::StreamGuard on_forward(forward);
    group->remember_stream();
    at::Tensor out = product;
    for (int i = 0; i < 4; ++i) at::mm_out(out, factor, factor);
  }
  const dist::Stream forward = dist::Stream::create(device());
  const at::Tensor weight = at::zeros({1024, 1024}, options_of(at::kFloat)).requires_grad_();
  const std::shared_ptr<fsdp::ParamGroup> group =
      fsdp::ParamGroup::create({{.compute = weight, .uses = {}, .fqn = "weight"}}, {});
  const at::Tensor factor = at::ones({1500, 1500}, options_of(at::kFloat)), product = at::empty_like(factor);
};

// The allocator knows only the stream that a gradient was made on, and its memory is written next.
TEST_F(DeviceMemoryTest, AGradientLivesUntilTheStreamOfTheForwardHasReadIt) {
  const GroupOfBusyStream of;
  { of.group->take_grad(0, at::ones({1024, 1024}, options_of(at::kFloat)), {}); }
  const at::Tensor next = at::zeros({1024, 1024}, options_of(at::kFloat));
  of.forward.synchronize();
  EXPECT_TRUE(of.group->shard(0).local.grad().eq(1).all().item<bool>());
}

// So do the casts that a product of Float8 reads, whose values nothing needs.
TEST_F(DeviceMemoryTest, CastsLiveUntilTheStreamOfTheForwardHasReadThem) {
  if (dist::device_backend()->compute_capability(0) < 89)
    GTEST_SKIP() << "this GPU has no products in Float8";
  const GroupOfBusyStream of;
  {
    const auto scaled = float8::products(float8::recipes().get("tensorwise"), float8::Arithmetic::Hardware,
                                         ops::default_products());
    const at::Tensor ones = at::ones({32, 1024}, options_of(at::kBFloat16));
    ops::WeightGrad grad{scaled, scaled->grad(ones, /*for_input=*/false, /*for_weight=*/true),
                         scaled->kept(scaled->input(ones, /*trains=*/true))};
    EXPECT_FALSE(grad.grad_output_NO.values.defined() || grad.input_NI.values.defined());
    of.group->take_grad(0, grad);
  }
  const at::Tensor next = at::zeros({32, 1024}, options_of(at::kByte));
  of.forward.synchronize();
  const at::Tensor gradient = of.group->shard(0).local.grad();
  EXPECT_TRUE(at::allclose(gradient, at::full_like(gradient, 32), 1e-5));  // scales round
}

// A block that was freed while another stream still uses it is in no tensor, and can't be used either.
TEST_F(DeviceMemoryTest, FreedBlocksInUseAreActive) {
  auto& backend = *dist::device_backend();
  const dist::Stream side = dist::Stream::create(device());
  at::Tensor factor = at::ones({1500, 1500}, options_of(at::kFloat)), product = at::empty_like(factor);
  const auto multiply = [&](int times) {
    side.wait(dist::Stream::current(device()));
    const dist::StreamGuard on_side(side);
    for (int i = 0; i < times; ++i) at::mm_out(product, factor, factor);
  };
  multiply(1);  // takes the workspace
  backend.reset_peak_memory(device().index());
  const int64_t before = memory().peak_allocated_bytes;
  for (int i = 0; i < 2; ++i) {
    const at::Tensor tensor = at::ones({8 * kMiB}, options_of(at::kByte));
    if (i == 0) multiply(8);
    side.keep_alive(tensor);
  }
  EXPECT_EQ(memory().peak_allocated_bytes - before, 8 * kMiB);
  EXPECT_EQ(memory().peak_active_bytes - before, 16 * kMiB);
  side.synchronize();
}

}  // namespace
}  // namespace titan

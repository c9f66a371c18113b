// Messages sent in one call, over a backend that has such calls and is stricter than NCCL: a batched message
// never matches a single one. A call ends with its last message.

#include <algorithm>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "dist/backends.h"
#include "dist/flight_record.h"
#include "distributed/small_stages.h"
#include "distributed/unconnected_world.h"
#include "distributed/world.h"
#include "parallel/context/distributed_attention.h"
#include "titan/parallel/pipeline_schedule.h"
#include "titan/train/parallel_dims.h"

namespace titan {
namespace {

using namespace titan::testing;  // NOLINT: the test's own names
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

// The purposes of a pipeline's links.
const std::string kDown = str(dist::kLongReceives, "down"), kUp = str(dist::kLongReceives, "up");

class AllOf final : public c10d::Work {
 public:
  explicit AllOf(std::vector<WorkPtr> works) : works_(std::move(works)) {}
  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](const WorkPtr& work) { return work->isCompleted(); });
  }
  // Gloo's messages can be waited for only once.
  bool wait(std::chrono::milliseconds timeout) override {
    for (const WorkPtr& work : std::exchange(works_, {})) work->wait(timeout);
    return true;
  }

 private:
  std::vector<WorkPtr> works_;
};

// The tag distinguishes batched messages from single ones.
class BatchingBackend final : public c10d::Backend {
 public:
  explicit BatchingBackend(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "batching"; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void startCoalescing() override { open_ = true; }
  bool is_open() const { return open_; }
  WorkPtr endCoalescing() override {
    open_ = false;
    batches.push_back(works_.size());
    return c10::make_intrusive<AllOf>(std::exchange(works_, {}));
  }
  WorkPtr send(Tensors& tensors, int peer, int) override {
    if (fails_at && works_.size() + 1 == fails_at) throw std::runtime_error("the network is down");
    return add(gloo_->send(tensors, peer, open_));
  }
  WorkPtr recv(Tensors& tensors, int peer, int) override { return add(gloo_->recv(tensors, peer, open_)); }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return gloo_->allreduce(tensors, options);
  }

  std::vector<size_t> batches;  // sizes of batches
  size_t num_single = 0;
  size_t fails_at = 0;  // number, from 1, of the message in a batch that fails; 0: none

 private:
  WorkPtr add(WorkPtr work) {
    open_ ? works_.push_back(work) : void(++num_single);
    return work;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  bool open_ = false;
  std::vector<WorkPtr> works_;
};

// The same two ranks, with batches on the pipeline's links.
class BatchingWorld {
 public:
  explicit BatchingWorld(const std::string& name) : impl_(unconnected_world(name)) {
    down = add(kDown);
    up = add(kUp);
    // A rank that has its connections may close them before the other one has any.
    (void)world().everyone()->sum(0.0, {"test::connected"});
  }
  dist::World get() const { return dist::World(impl_); }
  const dist::FlightRecorder& recorder() const { return *impl_->recorder; }

  c10::intrusive_ptr<BatchingBackend> down, up;

 private:
  c10::intrusive_ptr<BatchingBackend> add(const std::string& purpose) {
    const std::vector<int> ranks = {0, 1};
    auto gloo =
        dist::make_gloo_group(impl_->spec_of(purpose, purpose, "gloo", world().rank(), ranks), impl_->gloo);
    auto batching = c10::make_intrusive<BatchingBackend>(std::move(gloo));
    auto backends = std::make_unique<dist::GroupBackends>();
    backends->main = batching;
    auto checker = std::make_unique<dist::CallChecker>(
        impl_->spec_of(purpose, purpose, "calls", world().rank(), ranks), ranks,
        std::make_shared<dist::WaitingCalls>(impl_->store, world().rank()));
    impl_->groups[{ranks, purpose}] =
        std::make_shared<dist::Group>(dist::Group::Parts{.name = purpose,
                                                         .purpose = purpose,
                                                         .ranks = ranks,
                                                         .my_world_rank = world().rank(),
                                                         .backends = std::move(backends),
                                                         .recorder = impl_->recorder,
                                                         .checker = std::move(checker)});
    return batching;
  }

  std::shared_ptr<dist::World::Impl> impl_;
};

TEST(MessageBatches, ArriveInOneCall) {
  BatchingWorld batching("one_call");
  const auto group = batching.get().group({0, 1}, "", kDown);
  ASSERT_TRUE(group->has_batches(at::kCPU));
  if (world().rank() == 0) {
    group->send(Tensors{at::full({3}, 1.0), at::full({3}, 2.0)}, 1, {"t"}).wait();
  } else {
    const Tensors got = {at::zeros({3}), at::zeros({3})};
    const auto version = got[1]._version();
    group->receive(got, 0, {"t"}).wait();
    EXPECT_TRUE(got[0].eq(1).all().item<bool>() && got[1].eq(2).all().item<bool>());
    EXPECT_GT(got[1]._version(), version);
  }
  EXPECT_THAT(batching.down->batches, ::testing::ElementsAre(2));
  const auto calls = batching.recorder().snapshot();
  ASSERT_EQ(calls.size(), 1u);
  EXPECT_EQ(calls[0].bytes, 24);
  EXPECT_EQ(calls[0].sequence, 0u);
  EXPECT_EQ(calls[0].peer, 1 - world().rank());
  EXPECT_EQ(calls[0].op, world().rank() == 0 ? dist::CollectiveOp::Send : dist::CollectiveOp::Receive);
  EXPECT_EQ(calls[0].num_tensors, 2);
  EXPECT_EQ(calls[0].out.num_dims, 1);
  EXPECT_EQ(calls[0].out.dims[0], 3);
}

TEST(MessageBatches, AreRecordedAsOneTensorIfTheirSizesDiffer) {
  BatchingWorld batching("sizes");
  const auto group = batching.get().group({0, 1}, "", kDown);
  const Tensors tensors = {at::zeros({6}), at::zeros({2, 3})};
  if (world().rank() == 0)
    group->send(tensors, 1, {"t"}).wait();
  else
    group->receive(tensors, 0, {"t"}).wait();
  const auto calls = batching.recorder().snapshot();
  ASSERT_EQ(calls.size(), 1u);
  EXPECT_EQ(calls[0].bytes, 48);
  EXPECT_EQ(calls[0].num_tensors, 1);
  EXPECT_EQ(calls[0].out.num_dims, 1);
  EXPECT_EQ(calls[0].out.dims[0], 12);
}

// The error of a rank that batches other messages than its peer.
TEST(MessageBatches, ReportsABatchThatMeetsASingleMessage) {
  BatchingWorld batching("mismatch");
  const auto group = batching.get().group({0, 1}, "", kDown);
  const Tensors two = {at::zeros({3}), at::zeros({3})};
  if (world().rank() == 0) {
    group->send(two, 1, {"t"}).wait();
  } else {
    try {
      group->receive(at::zeros({3}), 0, {"t"}).wait();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr("2 tensors, each Float [3]"));
    }
    // The sent message is received outside the group.
    batching.down->startCoalescing();
    for (const at::Tensor& tensor : two) {
      Tensors part = {tensor};
      batching.down->recv(part, 0, 0);
    }
    batching.down->endCoalescing()->wait();
  }
  world().everyone()->barrier({"test::end"}).wait();
}

// The first message fails, so that no message is in flight to the other rank.
TEST(MessageBatches, ClosesABatchThatFails) {
  BatchingWorld batching("failure");
  if (world().rank() != 0) return;
  const auto group = batching.get().group({0, 1}, "", kDown);
  batching.down->fails_at = 1;
  try {
    group->send(Tensors{at::zeros({3}), at::zeros({3})}, 1, {"t"}).wait();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("the network is down"));
  }
  EXPECT_FALSE(batching.down->is_open());
}

TEST(MessageBatches, AreRefusedWithoutBackendSupport) {
  const auto group = world().everyone();
  EXPECT_FALSE(group->has_batches(at::kCPU));
  try {
    group->send(Tensors{at::zeros({3})}, 1 - world().rank(), {"t"}).wait();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("in one call in group 'world'"));
  }
}

// After two forwards, both ends exchange the results in one batch, then one result separately; in the
// backward only the receives are adjacent.
constexpr const char* kSchedule =
    "0F0,0F1,0SEND_F0,0SEND_F1,0F2,0SEND_F2,0RECV_B0,0RECV_B1,0B0,0B1,0RECV_B2,0B2\n"
    "1RECV_F0,1RECV_F1,1F1,1F0,1B0,1SEND_B0,1RECV_F2,1B1,1SEND_B1,1F2,1B2,1SEND_B2\n";

pipeline::Schedule schedule() {
  return pipeline::with_parameter_actions(pipeline::parse_schedule_csv(kSchedule, "by hand"));
}

TEST(MessageBatches, AreSentWhereBothEndsPairMessages) {
  BatchingWorld batching("schedule");
  const DeviceMesh pp = train::build_meshes(batching.get(), {.pp = 2}).pp;
  expect_equals_one_rank(pp, schedule(), {StageKind::Tanh, StageKind::Product});
  EXPECT_THAT(batching.down->batches, ::testing::ElementsAre(2, 2));  // one in each of two steps
  EXPECT_EQ(batching.down->num_single, 1u + 2);                       // the first is the links' first message
  EXPECT_TRUE(batching.up->batches.empty());
  EXPECT_EQ(batching.up->num_single, 1u + 6);
}

TEST(MessageBatches, CarryBothDirectionsOfAnExchange) {
  BatchingWorld batching("exchange");
  const auto group = batching.get().group({0, 1}, "", kDown);
  const int peer = 1 - world().rank();
  const at::Tensor sent = at::full({3}, 1.0 * world().rank()), got = at::zeros({3});
  group->exchange(sent, peer, got, peer, {"t"}).wait();
  EXPECT_TRUE(got.eq(peer).all().item<bool>());
  EXPECT_THAT(batching.down->batches, ::testing::ElementsAre(2));
  const auto calls = batching.recorder().snapshot();
  ASSERT_EQ(calls.size(), 2u);
  EXPECT_EQ(calls[0].op, dist::CollectiveOp::Send);
  EXPECT_EQ(calls[1].op, dist::CollectiveOp::Receive);
}

TEST(MessageBatches, CarryBothDirectionsOfARing) {
  BatchingWorld batching("ring");
  const auto group = [&](const std::string& purpose) { return batching.get().group({0, 1}, "", purpose); };
  const context::SequenceLayout layout(2, ContextLoadBalancer::HeadTail);
  const auto ring = context::make_attention(
      group(kDown), group(kUp), layout,
      {ContextLoadBalancer::HeadTail, ContextRotateMethod::AllToAll, ContextAttention::Ring});
  const at::Tensor q = at::randn({1, 4, 2, 8}), kv = at::randn({1, 4, 1, 8});
  const ops::AttentionSum sum = ring->forward(q, kv, kv, {"t"});
  EXPECT_THAT(batching.down->batches, ::testing::ElementsAre(2));
  ring->backward({q, kv, kv, sum.out_BSHD, sum.log_sum_exp_BHS}, q, {"t"});
  EXPECT_THAT(batching.down->batches, ::testing::ElementsAre(2, 2));
  EXPECT_THAT(batching.up->batches, ::testing::ElementsAre(2, 2)) << "gradients have a ring of their own";
  EXPECT_EQ(batching.down->num_single + batching.up->num_single, 0u);
}

TEST(MessageBatches, AreSingleMessagesOverSockets) {
  expect_equals_one_rank(train::build_meshes(world(), {.pp = 2}).pp, schedule(),
                         {StageKind::Tanh, StageKind::Product});
}

}  // namespace
}  // namespace titan

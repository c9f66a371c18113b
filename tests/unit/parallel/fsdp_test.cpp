// The crash message for a parameter that fully_shard has freed, and sharding driven by a pipeline schedule.

#include <gtest/gtest.h>
#include <csignal>

#include <ATen/ATen.h>

#include "parallel/fsdp/comm_context.h"
#include "parallel/pipeline_runtime.h"
#include "titan/core/crash.h"
#include "titan/core/error.h"
#include "titan/dist/device_mesh.h"
#include "titan/dist/world.h"
#include "titan/nn/layers.h"
#include "titan/parallel/fsdp.h"
#include "titan/parallel/parameters.h"

namespace titan {
namespace {

TEST(BufferPool, OnACpuKeepsABufferForTheNextForwards) {
  fsdp::BufferPool pool(at::kCPU);
  const dist::Stream current = dist::Stream::current(at::kCPU);
  const auto use = [&](int64_t bytes) { pool.release(pool.acquire(bytes, at::kByte, current), current); };
  constexpr int64_t small = 1 << 10, large = 1 << 20;
  use(large);
  for (int i = 0; i < 200; ++i) {
    pool.begin_forward();
    pool.hand_over();
    use(small);
  }
  EXPECT_EQ(pool.num_allocations(), 2);
  use(large);
  EXPECT_EQ(pool.num_allocations(), 3) << "one that no forward used for so long is freed";
}

// Like a user's own training loop, without titan's main().
nn::Linear used_layer() {
  const dist::World world = dist::init({.backend = "fake", .fake_rank = 0, .fake_world_size = 2});
  nn::Linear layer(8, 8);
  fully_shard(layer, {.mesh = DeviceMesh::create(world, {{"dp_shard", 2}})});
  materialize(layer, 1);
  layer(at::ones({2, 8})).sum().backward();
  return layer;
}

TEST(FreedParameterDeathTest, IsNamedByTheCrashHandlerOfDistInit) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(used_layer()->weight.detach().clone(), ::testing::KilledBySignal(SIGSEGV),
              "fatal signal SIGSEGV [^\n]*\n.titan. likely a sharded parameter used outside its module: ");
}

TEST(FreedParameterDeathTest, IsNotReportedWithoutTheHandler) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        decline_crash_handler();
        used_layer()->weight.detach().clone();
      },
      ::testing::KilledBySignal(SIGSEGV), "^$");
}

class NetImpl : public nn::Module {
 public:
  NetImpl() : embedding(7, 4), norm(4), linear(4, 3, nn::LinearOptions{.bias = true}) {
    register_module("embedding", embedding);
    register_module("norm", norm);
    register_module("linear", linear);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    check_entered_through_ref();
    return linear(norm(embedding(tokens))).square().sum();
  }
  nn::Embedding embedding;
  nn::RMSNorm norm;
  nn::Linear linear;
};
TITAN_MODULE(Net);

Net make_net() {
  Net net;
  fully_shard(net->linear, {});
  fully_shard(net, {});
  materialize(net, 1);
  return net;
}

at::Tensor tokens_of(int micro_batch) { return (at::arange(5) + micro_batch).remainder(7); }

std::vector<at::Tensor> gradients(const Net& net) {
  std::vector<at::Tensor> result;
  for (const Parameter& parameter : parameters(net)) result.push_back(parameter.data.local.grad());
  return result;
}

std::vector<at::Tensor> gradients_of_two_backwards() {
  const Net net = make_net();
  for (const int micro_batch : {1, 0}) net(tokens_of(micro_batch)).backward();
  return gradients(net);
}

void expect_equal(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], expected[i])) << i;
}

TEST(ScheduledSharding, SeveralForwardsCanPrecedeBackwards) {
  const Net net = make_net();
  ScheduledSharding sharding{net};
  sharding.unshard();
  const at::Tensor first = net(tokens_of(0)), second = net(tokens_of(1));
  second.backward();
  first.backward();
  sharding.reduce();
  sharding.finish();
  expect_equal(gradients(net), gradients_of_two_backwards());
}

// The first forward sums its gradient in the group's memory, which the second one's backward needs first.
TEST(ScheduledSharding, LossHeadsCanRunAllForwardsFirst) {
  const auto make_head = [] {
    nn::LinearCrossEntropy head(4, 7, nn::LossHeadOptions{});
    fully_shard(head, {});
    materialize(head, 1);
    return head;
  };
  const auto loss_of = [](nn::LinearCrossEntropy& head, int micro_batch) {
    return head(at::sin(at::arange(20).view({5, 4}) + micro_batch), tokens_of(micro_batch), 10);
  };
  nn::LinearCrossEntropy head = make_head(), expected = make_head();
  ScheduledSharding sharding{head};
  sharding.unshard();
  const at::Tensor first = loss_of(head, 0), second = loss_of(head, 1), third = loss_of(head, 2);
  second.backward();
  first.backward();
  third.backward();
  sharding.reduce();
  sharding.finish();
  for (const int micro_batch : {1, 0, 2}) loss_of(expected, micro_batch).backward();
  EXPECT_TRUE(at::equal(parameters(head)[0].data.local.grad(), parameters(expected)[0].data.local.grad()));
}

TEST(ScheduledSharding, WeightGradientsCanWait) {
  const Net net = make_net();
  ScheduledSharding sharding{net};
  DelayedGradients delayed[2];
  sharding.unshard();
  const at::Tensor losses[] = {net(tokens_of(0)), net(tokens_of(1))};
  for (const int micro_batch : {1, 0}) {
    sharding.delay_weight_gradients(delayed[micro_batch]);
    losses[micro_batch].backward();
    sharding.stop_delaying();
    EXPECT_EQ(delayed[micro_batch].size(), 3u);  // the product, the norm and the embedding
    EXPECT_GT(delayed[micro_batch].bytes(), 0);
  }
  const std::vector<at::Tensor> before = gradients(net);
  EXPECT_FALSE(before[0].defined());  // the embedding
  EXPECT_FALSE(before[1].defined());  // the norm
  EXPECT_FALSE(before[2].defined());  // the product
  EXPECT_TRUE(before[3].defined());   // its bias
  for (const int micro_batch : {1, 0}) {
    delayed[micro_batch].compute();
    EXPECT_EQ(delayed[micro_batch].size(), 0u);
    EXPECT_EQ(delayed[micro_batch].bytes(), 0);
  }
  sharding.reduce();
  sharding.finish();
  expect_equal(gradients(net), gradients_of_two_backwards());
}

TEST(ScheduledSharding, DiscardRemovesAFailedStep) {
  const Net net = make_net();
  ScheduledSharding sharding{net};
  sharding.unshard();
  DelayedGradients delayed;
  sharding.delay_weight_gradients(delayed);
  net(tokens_of(3)).backward();
  sharding.discard();
  for (const Parameter& parameter : parameters(net)) at::Tensor(parameter.data.local).mutable_grad().reset();
  sharding.unshard();
  for (const int micro_batch : {1, 0}) net(tokens_of(micro_batch)).backward();
  sharding.reduce();
  sharding.finish();
  expect_equal(gradients(net), gradients_of_two_backwards());
}

TEST(ScheduledSharding, LeavesAModelWithoutShardsAlone) {
  const Net net;
  ScheduledSharding sharding{net};
  sharding.unshard();
  net(tokens_of(0)).backward();
  sharding.reduce();
  sharding.finish();
  EXPECT_TRUE(net->linear->weight.grad().defined());
}

}  // namespace
}  // namespace titan

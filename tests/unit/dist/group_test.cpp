// Groups without peers: of one rank, and of the fake backend.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dist/flight_record.h"
#include "titan/core/error.h"
#include "titan/dist/collectives.h"
#include "titan/dist/world.h"

namespace titan::dist {
namespace {

using ::testing::HasSubstr;

World fake_world(int rank, int size) {
  return init({.backend = "fake", .fake_rank = rank, .fake_world_size = size});
}

TEST(GroupOfOne, CallsAreLocal) {
  const auto group = Group::alone("self", 0);
  const at::Tensor in = at::arange(6, at::kFloat);
  at::Tensor out = at::zeros({6});
  group->all_gather(out, in, {"test"}).wait();
  EXPECT_TRUE(out.equal(in));
  out.zero_();
  group->reduce_scatter(out, in, {"test"}).wait();
  EXPECT_TRUE(out.equal(in));
  Work work = group->all_reduce(out, ReduceOp::Sum, {"test"});
  EXPECT_FALSE(work.pending());
  work.wait();
  EXPECT_TRUE(out.equal(in));
  EXPECT_EQ(group->sum(2.5, {"test"}), 2.5);
  EXPECT_EQ(group->all_gather_text("abc", {"test"}), std::vector<std::string>{"abc"});
}

TEST(GroupOfOne, AcceptsInPlaceAndParameters) {
  const auto group = Group::alone("self", 0);
  at::Tensor parameter = at::ones({4}).requires_grad_();
  const auto version = parameter._version();
  group->all_gather(parameter, parameter, {"test"}).wait();
  group->all_gather(parameter, at::full({4}, 2.0), {"test"}).wait();
  EXPECT_EQ(parameter[0].item<double>(), 2.0);
  EXPECT_EQ(parameter._version(), version) << "as with gloo, the version doesn't change";
}

TEST(FakeGroup, UsesOwnDataForTheOthers) {
  const auto group = fake_world(2, 4).everyone();
  EXPECT_EQ(group->rank(), 2);
  at::Tensor out = at::zeros({8});
  group->all_gather(out, at::tensor({1.0F, 2.0F}), {"test"}).wait();
  EXPECT_TRUE(out.equal(at::tensor({1.0F, 2.0F}).repeat({4})));
  at::Tensor part = at::zeros({2});
  group->reduce_scatter(part, at::arange(8, at::kFloat), {"test"}).wait();
  EXPECT_TRUE(part.equal(at::tensor({4.0F, 5.0F})));
  EXPECT_EQ(group->sum(int64_t{7}, {"test"}), 7);
}

TEST(FakeGroup, TakesMetaTensors) {
  const auto group = fake_world(0, 1024).everyone();
  const auto meta = at::TensorOptions(at::kBFloat16).device(at::kMeta);
  const at::Tensor whole = at::empty({1024 * 7}, meta), part = at::empty({7}, meta);
  group->all_gather(whole, part, {"test"}).wait();
  group->reduce_scatter(part, whole, {"test"}).wait();
  group->all_reduce(whole, ReduceOp::Max, {"test"}).wait();
  group->all_to_all(whole, whole, {"test"}).wait();
  group->broadcast(whole, 3, {"test"}).wait();
  group->send(part, 1, {"test"}).wait();
  group->receive(part, 1, {"test"}).wait();
  group->barrier({"test"}).wait();
}

TEST(Group, CallsAreRecorded) {
  const World world = fake_world(1, 2);
  const auto before = world.recorder().num_calls();
  at::Tensor tensor = at::zeros({3}, at::kDouble);
  Work work = world.everyone()->broadcast(tensor, 0, {"fsdp::unshard", "layers.3"});
  CallRecord call = world.recorder().snapshot().back();
  EXPECT_EQ(call.state, CallState::Launched);
  work.wait();
  call = world.recorder().snapshot().back();
  EXPECT_EQ(world.recorder().num_calls(), before + 1);
  EXPECT_EQ(call.state, CallState::Finished);
  EXPECT_EQ(call.op, CollectiveOp::Broadcast);
  EXPECT_EQ(call.group->name, "world");
  EXPECT_EQ(call.out.num_dims, 1);
  EXPECT_EQ(call.out.dims[0], 3);
  EXPECT_STREQ(call.phase, "fsdp::unshard");
  EXPECT_STREQ(call.module, "layers.3");
  EXPECT_EQ(call.bytes, 24);
  EXPECT_EQ(call.peer, 0);
  EXPECT_GE(call.end_ns, call.start_ns);
}

TEST(Group, NamesWrongTensors) {
  const auto group = fake_world(0, 2).everyone();
  const auto message = [](auto&& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  const at::Tensor in = at::zeros({4});
  EXPECT_THAT(message([&] { group->all_gather(at::zeros({7}), in, {"t"}).wait(); }),
              HasSubstr("out has 7 elements, in 4"));
  EXPECT_THAT(message([&] { group->all_gather(at::zeros({8}, at::kInt), in, {"t"}).wait(); }),
              HasSubstr("Int"));
  EXPECT_THAT(message([&] {
                group->all_reduce(at::zeros({4, 4}).t(), ReduceOp::Sum, {"t"}).wait();
              }),
              HasSubstr("contiguous"));
  EXPECT_THAT(message([&] { group->send(in, 0, {"t"}).wait(); }), HasSubstr("send to rank 0"));
  EXPECT_THAT(message([&] { group->broadcast(in, 2, {"t"}).wait(); }), HasSubstr("broadcast from rank 2"));
}

TEST(Group, RefusesCallsOfNonMembers) {
  const World world = fake_world(0, 4);
  const auto group = world.group({1, 3}, "others");
  EXPECT_FALSE(group->contains_me());
  EXPECT_THROW(group->barrier({"t"}).wait(), Error);
}

TEST(World, MakesAGroupOnceForAList) {
  const World world = fake_world(0, 4);
  EXPECT_EQ(world.group({0, 2}, "a"), world.group({0, 2}, "b"));
  EXPECT_THROW(world.group({2, 0}, "backwards"), Error);
  EXPECT_THROW(world.group({0, 4}, "too far"), Error);
  EXPECT_THROW(world.group({}, "none"), Error);
}

TEST(World, WithoutALauncherIsOneRankWithoutSockets) {
  const World world = init({.device = "cpu"});
  EXPECT_EQ(world.size(), 1);
  EXPECT_EQ(world.launched_by(), "none");
  EXPECT_EQ(world.backend(), "gloo");
  EXPECT_EQ(world.local_size(), 1);
  EXPECT_TRUE(world.device().is_cpu());
  world.everyone()->barrier({"t"}).wait();
}

TEST(World, UnknownBackendsAndDevices) {
  EXPECT_THROW(init({.backend = "mpi"}), ConfigError);
  EXPECT_THROW(init({.device = "tpu"}), ConfigError);
  EXPECT_THROW(init({.backend = "nccl", .device = "cpu"}), ConfigError);
  EXPECT_THROW(init({.backend = "fake", .fake_rank = 2, .fake_world_size = 2}), ConfigError);
}

}  // namespace
}  // namespace titan::dist

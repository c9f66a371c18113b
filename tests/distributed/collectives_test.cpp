// Compares every collective over the real backend with its definition, and tests what happens when ranks
// disagree.

#include "titan/dist/collectives.h"

#include <chrono>
#include <thread>

#include <ATen/ATen.h>
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dist/flight_record.h"
#include "dist/stream_clock.h"
#include "distributed/unconnected_world.h"
#include "distributed/world.h"
#include "titan/core/error.h"
#include "titan/dist/device_mesh.h"

namespace titan {
namespace {

using dist::ReduceOp;
using testing::device;
using testing::options_of;
using testing::world;
constexpr dist::Label kLabel = {"test::phase", "layers.0"};

/// Part `part` of `rank`'s contribution: small whole numbers, exact in bf16.
at::Tensor contribution(int rank, int part, int64_t n, at::ScalarType dtype) {
  return (at::arange(n, at::kLong).remainder(5) + rank + 2 * part).to(device(), dtype);
}

/// [size * n], all parts of `rank`.
at::Tensor contributions(int rank, int size, int64_t n, at::ScalarType dtype) {
  std::vector<at::Tensor> parts;
  for (int part = 0; part < size; ++part) parts.push_back(contribution(rank, part, n, dtype));
  return at::cat(parts);
}

class Collectives : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  dist::Group& group = *world().everyone();
  const int size = group.size(), rank = group.rank();
  const at::ScalarType dtype = GetParam();
};

// Sizes around the thresholds at which backends switch algorithms, and odd ones.
const std::vector<int64_t> kSizes = {1, 7, 1000, 70001};

TEST_P(Collectives, AllGather) {
  for (const int64_t n : kSizes) {
    at::Tensor out = at::zeros({size * n}, options_of(dtype));
    group.all_gather(out, contribution(rank, 0, n, dtype), kLabel).wait();
    for (int r = 0; r < size; ++r) EXPECT_TRUE(out.narrow(0, r * n, n).equal(contribution(r, 0, n, dtype)));
  }
}

// A dimension for the ranks, before those of a part.
TEST_P(Collectives, AllGatherOfPartsWithMoreDimensions) {
  const at::Tensor mine = contribution(rank, 0, 12, dtype).view({2, 3, 2});
  const at::Tensor out = at::zeros({size, 2, 3, 2}, options_of(dtype));
  group.all_gather(out, mine, kLabel).wait();
  for (int r = 0; r < size; ++r)
    EXPECT_TRUE(out[r].equal(contribution(r, 0, 12, dtype).view({2, 3, 2}))) << r;
}

TEST_P(Collectives, AllGatherInPlace) {
  const int64_t n = 1000;
  at::Tensor out = at::zeros({size * n}, options_of(dtype));
  at::Tensor mine = out.narrow(0, rank * n, n);
  mine.copy_(contribution(rank, 0, n, dtype));
  group.all_gather(out, mine, kLabel).wait();
  for (int r = 0; r < size; ++r) EXPECT_TRUE(out.narrow(0, r * n, n).equal(contribution(r, 0, n, dtype)));
}

TEST_P(Collectives, ReduceScatter) {
  for (const int64_t n : kSizes) {
    const at::Tensor in = contributions(rank, size, n, dtype), before = in.clone();
    at::Tensor out = at::zeros({n}, options_of(dtype)), expected = at::zeros_like(out);
    group.reduce_scatter(out, in, kLabel).wait();
    for (int r = 0; r < size; ++r) expected += contribution(r, rank, n, dtype);
    EXPECT_TRUE(out.equal(expected)) << n;
    EXPECT_TRUE(in.equal(before)) << "the input is unchanged";
  }
}

TEST_P(Collectives, AllReduce) {
  for (const int64_t n : kSizes) {
    at::Tensor sum = contribution(rank, 0, n, dtype), max = sum.clone(), min = sum.clone();
    group.all_reduce(sum, ReduceOp::Sum, kLabel).wait();
    group.all_reduce(max, ReduceOp::Max, kLabel).wait();
    group.all_reduce(min, ReduceOp::Min, kLabel).wait();
    at::Tensor expected = at::zeros({n}, options_of(dtype));
    for (int r = 0; r < size; ++r) expected += contribution(r, 0, n, dtype);
    EXPECT_TRUE(sum.equal(expected));
    EXPECT_TRUE(max.equal(contribution(size - 1, 0, n, dtype)));
    EXPECT_TRUE(min.equal(contribution(0, 0, n, dtype)));
  }
}

TEST_P(Collectives, Broadcast) {
  for (int root = 0; root < size; ++root) {
    at::Tensor tensor = contribution(rank, 0, 100, dtype);
    group.broadcast(tensor, root, kLabel).wait();
    EXPECT_TRUE(tensor.equal(contribution(root, 0, 100, dtype)));
  }
}

TEST_P(Collectives, AllToAll) {
  for (const int64_t n : kSizes) {
    at::Tensor out = at::zeros({size * n}, options_of(dtype));
    group.all_to_all(out, contributions(rank, size, n, dtype), kLabel).wait();
    for (int r = 0; r < size; ++r)
      EXPECT_TRUE(out.narrow(0, r * n, n).equal(contribution(r, rank, n, dtype)));
  }
}

TEST_P(Collectives, SendAndReceiveAroundTheRing) {
  if (size == 1) GTEST_SKIP() << "needs a peer";
  const at::Tensor mine = contribution(rank, 0, 1000, dtype);
  at::Tensor from_left = at::zeros_like(mine), from_right = at::zeros_like(mine);
  const int left = (rank + size - 1) % size, right = (rank + 1) % size;
  dist::Work to_right = group.send(mine, right, kLabel), to_left = group.send(mine + 1, left, kLabel);
  group.receive(from_left, left, kLabel).wait();
  group.receive(from_right, right, kLabel).wait();
  to_right.wait();
  to_left.wait();
  EXPECT_TRUE(from_left.equal(contribution(left, 0, 1000, dtype)));
  // With two ranks both messages come from the same peer, in the order of sending: first the one to its
  // right, then the one to its left.
  EXPECT_TRUE(from_right.equal(contribution(right, 0, 1000, dtype) + 1));
}

INSTANTIATE_TEST_SUITE_P(Types, Collectives, ::testing::Values(at::kFloat, at::kBFloat16, at::kDouble),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

TEST(HostValues, CombineSumsMaximaAndTexts) {
  auto& group = *world().everyone();
  const int size = group.size();
  EXPECT_EQ(group.sum(0.5 * group.rank(), kLabel), 0.25 * size * (size - 1));
  EXPECT_EQ(group.max(-1.0 - group.rank(), kLabel), -1.0);
  EXPECT_EQ(group.sum((int64_t{1} << 53) + group.rank(), kLabel),
            size * (int64_t{1} << 53) + size * (size - 1) / 2);
  const auto texts = group.all_gather_text(std::string(static_cast<size_t>(group.rank()), 'x'), kLabel);
  for (int r = 0; r < size; ++r) EXPECT_EQ(texts[r], std::string(static_cast<size_t>(r), 'x'));
}

TEST(Overlap, CallsInFlightKeepSeparateResults) {
  auto& group = *world().everyone();
  const int size = group.size();
  std::vector<at::Tensor> outs;
  std::vector<dist::Work> works;
  for (int call = 0; call < 8; ++call) {
    outs.push_back(at::zeros({size * 5000}, options_of(at::kFloat)));
    works.push_back(group.all_gather(
        outs.back(), at::full({5000}, 100.0 * call + group.rank(), options_of(at::kFloat)), kLabel));
  }
  for (auto& work : works) work.wait();
  for (int call = 0; call < 8; ++call) {
    for (int r = 0; r < size; ++r) EXPECT_EQ(outs[call][r * 5000 + 4999].item<double>(), 100.0 * call + r);
  }
}

TEST(Overlap, DroppedWorkIsFinished) {
  auto& group = *world().everyone();
  at::Tensor tensor = at::ones({100000}, options_of(at::kFloat));
  static_cast<void>(group.all_reduce(tensor, ReduceOp::Sum, kLabel));
  EXPECT_EQ(tensor.sum().item<double>(), 100000.0 * group.size());
}

// With NCCL only the device knows. Rank 0 comes late, so the others' calls take as long as they wait for it.
TEST(Overlap, RecordsHaveTheTimesOfTheDevice) {
  if (world().backend() != "nccl" || world().size() == 1) GTEST_SKIP() << "needs NCCL and a peer";
  constexpr std::chrono::milliseconds kLate(200);
  auto& group = *world().everyone();
  const at::Tensor tensor = at::ones({1000}, options_of(at::kFloat));
  group.all_reduce(tensor, ReduceOp::Sum, kLabel).wait();
  tensor.sum().item<double>();
  if (world().rank() == 0) std::this_thread::sleep_for(kLate);
  group.all_reduce(tensor, ReduceOp::Sum, {"test::timed"}).wait();
  tensor.sum().item<double>();
  world().recorder().sweep();
  const dist::CallRecord call = world().recorder().snapshot().back();
  ASSERT_STREQ(call.phase, "test::timed");
  const auto most = std::chrono::duration_cast<std::chrono::nanoseconds>(kLate).count();
  EXPECT_GT(call.device_ns, 0);
  if (world().rank() == 0) {
    EXPECT_LT(call.device_ns, most / 2);
  } else {
    EXPECT_GT(call.device_ns, most / 2);
  }
}

// Half of the step is work of another stream, which stands for other ranks.
TEST(Overlap, AStreamIsTimedWithoutWaitingForIt) {
  if (!device().is_cuda()) GTEST_SKIP() << "a CPU has no streams";
  const dist::Stream current = dist::Stream::current(device()), side = dist::Stream::create(device());
  const at::Tensor factor = at::ones({700, 700}, options_of(at::kFloat));
  at::Tensor mine = at::mm(factor, factor), others = at::mm(factor, factor);
  const auto multiply = [&](at::Tensor& product) {
    for (int i = 0; i < 6; ++i) at::mm_out(product, factor, factor);
  };
  current.synchronize();
  dist::StreamClock clock;
  dist::Event begun = dist::Event::timed(), left = dist::Event::timed(), arrived = dist::Event::timed();
  clock.start(device());
  begun.record(current);
  multiply(mine);
  side.wait(current);
  {
    const dist::StreamGuard on_side(side);
    multiply(others);
  }
  left.record(current);
  {
    const dist::PeerWait waiting("all_gather");
    current.wait(side);
  }
  arrived.record(current);
  EXPECT_TRUE(clock.stop());
  EXPECT_TRUE(clock.take().empty()) << "the host has waited for the device";
  current.synchronize();
  const auto steps = clock.take();
  ASSERT_EQ(steps.size(), 1U);
  // The clock's marks are between these events. They are adjacent in the queue, but a busy machine may pause there.
  constexpr double precision = 1e-5;  // CUDA's times are milliseconds in fp32
  EXPECT_LE(steps[0].waited_s, arrived.seconds_since(left) + precision);
  EXPECT_GT(steps[0].waited_s, 0);
  EXPECT_GE(steps[0].span_s, arrived.seconds_since(begun) - precision);
  EXPECT_GT(left.seconds_since(begun), 0);
}

TEST(Meshes, GroupsAlongAxesOfTheRealWorld) {
  if (world().size() != 4) GTEST_SKIP() << "made for 4 ranks";
  const auto mesh = DeviceMesh::create(world(), {{"dp_replicate", 2}, {"dp_shard", -1}, {"tp", 1}});
  const int rank = world().rank();
  EXPECT_EQ(mesh.group("dp_shard")->sum(int64_t{rank}, kLabel), rank < 2 ? 1 : 5);
  EXPECT_EQ(mesh.group("dp_replicate")->sum(int64_t{rank}, kLabel), rank % 2 ? 4 : 2);
  EXPECT_EQ(mesh.group("tp")->sum(int64_t{rank}, kLabel), rank);
  EXPECT_EQ(mesh.flatten({"dp_replicate", "dp_shard"}, "dp").group()->sum(int64_t{rank}, kLabel), 6);
  EXPECT_EQ(mesh.group(), world().everyone());
}

// Counted by virtual GPUs. Many groups carry only numbers of the host.
TEST(Communicators, AreMadeByTheFirstDeviceTensor) {
  const auto count = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "virtual_gpu_num_communicators"));
  if (!count || world().backend() != "nccl") GTEST_SKIP() << "runs on virtual GPUs, with --nccl";
  if (world().size() == 1) GTEST_SKIP() << "one rank needs no communicator";
  const int before = count();
  const auto group = world().group(world().everyone()->ranks(), "fresh", "communicators_test");
  EXPECT_EQ(group->backend_name(), "nccl");
  EXPECT_EQ(group->sum(int64_t{1}, {"test"}), world().size());
  group->barrier({"test"}).wait();
  EXPECT_EQ(count(), before);
  const at::Tensor ones = at::ones({4}, options_of(at::kFloat));
  for (int call = 0; call < 2; ++call) group->all_reduce(ones, dist::ReduceOp::Sum, {"test"}).wait();
  EXPECT_EQ(ones.sum().item<float>(), 4 * world().size() * world().size());
  EXPECT_EQ(count(), before + 1);
}

// Counted by virtual GPUs. NCCL zeroes buffers on the legacy stream when it takes an algorithm for the first time.
TEST(Communicators, WaitForTheLegacyStreamBeforeTheFirstCallOfAKind) {
  const auto start = reinterpret_cast<void (*)()>(dlsym(RTLD_DEFAULT, "virtual_gpu_start_counting"));
  const auto count = reinterpret_cast<uint64_t (*)(const char*, const char*, const char*)>(
      dlsym(RTLD_DEFAULT, "virtual_gpu_count"));
  if (!count || world().backend() != "nccl") GTEST_SKIP() << "runs on virtual GPUs, with --nccl";
  if (world().size() == 1) GTEST_SKIP() << "one rank needs no communicator";
  const auto group = world().group(world().everyone()->ranks(), "kinds", "communicators_test");
  const auto waits_of_sum = [&](int64_t numel, at::ScalarType dtype = at::kFloat,
                                dist::ReduceOp operation = dist::ReduceOp::Sum) {
    const at::Tensor ones = at::ones({numel}, options_of(dtype));
    start();
    group->all_reduce(ones, operation, {"test"}).wait();
    return count("host_waits", nullptr, nullptr);
  };
  waits_of_sum(4);  // connects
  EXPECT_EQ(waits_of_sum(4), 0u);
  EXPECT_EQ(waits_of_sum(1000), 1u);
  EXPECT_EQ(waits_of_sum(1000), 0u);
  EXPECT_EQ(waits_of_sum(999), 1u);
  EXPECT_EQ(waits_of_sum(500, at::kDouble), 1u) << "as many bytes";
  EXPECT_EQ(waits_of_sum(500, at::kDouble, dist::ReduceOp::Max), 1u);
  EXPECT_EQ(waits_of_sum(500, at::kDouble, dist::ReduceOp::Max), 0u);
  // Other functions have algorithms of their own.
  const at::Tensor whole = at::ones({1000 * world().size()}, options_of(at::kFloat)),
                   part = at::ones({1000}, options_of(at::kFloat));
  const auto waits_of = [&](const std::function<dist::Work()>& call) {
    start();
    call().wait();
    return count("host_waits", nullptr, nullptr);
  };
  const auto gather = [&] { return group->all_gather(whole, part, {"test"}); };
  const auto reduce = [&] { return group->reduce_scatter(part, whole, {"test"}); };
  const auto gather_two = [&] { return group->all_gather({whole, whole.clone()}, {part, part}, {"test"}); };
  EXPECT_EQ(waits_of(gather), 1u);
  EXPECT_EQ(waits_of(gather), 0u);
  EXPECT_EQ(waits_of(reduce), 1u);
  EXPECT_EQ(waits_of(reduce), 0u);
  EXPECT_EQ(waits_of(gather_two), 1u) << "twice the bytes";
  EXPECT_EQ(waits_of(gather_two), 0u);
}

// Counted by virtual GPUs: both directions in one call, so that they use the link at the same time.
TEST(Exchanges, AreOneLaunch) {
  const auto start = reinterpret_cast<void (*)()>(dlsym(RTLD_DEFAULT, "virtual_gpu_start_counting"));
  const auto count = reinterpret_cast<uint64_t (*)(const char*, const char*, const char*)>(
      dlsym(RTLD_DEFAULT, "virtual_gpu_count"));
  if (!count || world().backend() != "nccl") GTEST_SKIP() << "runs on virtual GPUs, with --nccl";
  const int size = world().size(), rank = world().rank();
  if (size == 1) GTEST_SKIP() << "needs a peer";
  const int left = (rank + size - 1) % size, right = (rank + 1) % size;
  const at::Tensor mine = at::full({1000}, rank, options_of(at::kFloat)), received = at::zeros_like(mine);
  const auto exchange = [&] { world().everyone()->exchange(mine, right, received, left, kLabel).wait(); };
  exchange();  // connects
  start();
  exchange();
  EXPECT_EQ(count("launches", nullptr, "ncclSend and ncclRecv"), 1u);
  EXPECT_EQ(count("launches", nullptr, "ncclSend") + count("launches", nullptr, "ncclRecv"), 0u);
  EXPECT_EQ(received.sum().item<float>(), 1000.f * left);
}

// Counted by virtual GPUs: adjacent messages of a pipeline's schedule go so.
TEST(Batches, OfMessagesAreOneLaunch) {
  const auto start = reinterpret_cast<void (*)()>(dlsym(RTLD_DEFAULT, "virtual_gpu_start_counting"));
  const auto count = reinterpret_cast<uint64_t (*)(const char*, const char*, const char*)>(
      dlsym(RTLD_DEFAULT, "virtual_gpu_count"));
  if (!count || world().backend() != "nccl") GTEST_SKIP() << "runs on virtual GPUs, with --nccl";
  if (world().size() != 2) GTEST_SKIP() << "made for 2 ranks";
  dist::Group& group = *world().everyone();
  const int rank = world().rank();
  const std::vector<at::Tensor> messages = {at::zeros({1000}, options_of(at::kFloat)),
                                            at::zeros({1000}, options_of(at::kFloat))};
  const auto pass = [&](float value) {
    if (rank == 0) {
      messages[0].fill_(value);
      messages[1].fill_(value + 1);
      group.send(messages, 1, kLabel).wait();
    } else {
      group.receive(messages, 0, kLabel).wait();
    }
  };
  pass(1);  // connects
  start();
  pass(5);
  EXPECT_EQ(count("launches", nullptr, rank == 0 ? "ncclSend" : "ncclRecv"), 1u);
  for (size_t i = 0; i < messages.size(); ++i)
    EXPECT_TRUE(messages[i].eq(5 + static_cast<int>(i)).all().item<bool>()) << "message " << i;
}

// LibTorch's pool has 32 streams. A message that comes late delays no other group's.
TEST(Communicators, NeverShareAStream) {
  if (world().size() != 2) GTEST_SKIP() << "made for 2 ranks";
  constexpr int kGroups = 34;
  const int rank = world().rank(), peer = 1 - rank;
  std::vector<std::shared_ptr<dist::Group>> groups;
  std::vector<at::Tensor> messages;
  std::vector<dist::Work> calls;
  // From rank 0 to rank 1, or the other way.
  const auto pass = [&](size_t i, int from) {
    dist::Group& group = *groups[i];
    calls.push_back(rank == from ? group.send(messages[i], peer, kLabel)
                                 : group.receive(messages[i], peer, kLabel));
  };
  for (size_t i = 0; i < kGroups; ++i) {
    groups.push_back(world().group(world().everyone()->ranks(), "pair", str("stream test ", i)));
    messages.push_back(at::full({2}, rank, options_of(at::kFloat)));
    pass(i, i == 0 ? 1 : 0);  // connects
    calls.back().wait();
  }
  for (at::Tensor& message : messages) message.fill_(rank == 0 ? 5 : 7);
  if (rank == 0) pass(0, 1);
  for (size_t i = 1; i < kGroups; ++i) {
    pass(i, 0);
    if (rank == 1) calls.back().wait();
  }
  if (rank == 1) pass(0, 1);
  for (dist::Work& call : calls) call.wait();
  for (size_t i = 0; i < kGroups; ++i) EXPECT_EQ(messages[i].sum().item<float>(), i == 0 ? 14 : 10);
}

// Over NCCL the end of a group aborts its calls. A world keeps its groups, so this one ends.
TEST(Communicators, EndAfterTheirMessagesHaveArrived) {
  if (world().size() != 2) GTEST_SKIP() << "made for 2 ranks";
  const at::Tensor message = at::zeros({8 << 20}, options_of(at::kFloat));  // more than NCCL's buffers hold
  {
    const dist::World fresh(testing::unconnected_world("late receive"));
    const auto group = fresh.group({0, 1}, "pair", "late receive");
    const auto pass = [&] {
      if (world().rank() == 0) {
        group->send(message, 1, kLabel).wait();
      } else {
        group->receive(message, 0, kLabel).wait();
      }
    };
    pass();  // connects
    if (world().rank() == 0) message.fill_(5);
    if (world().rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(500));
    pass();
  }
  EXPECT_TRUE(message.eq(5).all().item<bool>());
}

// Rank 0 waits for a call that the others never make.
TEST(Failures, TimeoutNamesTheCall) {
  if (world().size() == 1) GTEST_SKIP() << "needs a peer";
  auto group = world().group(world().everyone()->ranks(), "lonely", "time-out test");
  group->set_timeout(std::chrono::milliseconds(300));
  if (world().rank() == 0) {
    at::Tensor tensor = at::zeros({8}, options_of(at::kFloat));
    try {
      group->all_reduce(tensor, ReduceOp::Sum, {"fsdp::reduce", "layers.7"}).wait();
      ADD_FAILURE() << "a call without its peers returned";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr("in group 'lonely' failed on its rank 0 of"));
      EXPECT_THAT(error.what(), ::testing::HasSubstr("fsdp::reduce layers.7, 32 bytes"));
    }
    EXPECT_EQ(world().recorder().snapshot().back().state, dist::CallState::Failed);
  }
  world().everyone()->barrier(kLabel).wait();
}

// Ranks that lost their common order report what each one calls. Sockets can't detect it.
TEST(Failures, DifferentCallsAreNamed) {
  auto group = world().group(world().everyone()->ranks(), "mixed up", "mismatch test");
  if (world().size() == 1 || group->backend_name() != "host") GTEST_SKIP() << "needs a peer on this host";
  at::Tensor tensor = at::zeros({8}, options_of(at::kFloat));
  try {
    if (world().rank() == 0)
      group->all_reduce(tensor, ReduceOp::Sum, kLabel).wait();
    else
      group->broadcast(tensor, 0, kLabel).wait();
    ADD_FAILURE() << "different calls were accepted";
  } catch (const Error& error) {
    const std::string what = error.what();
    const bool named = what.find("calls all_reduce of 32 bytes") != std::string::npos ||
                       what.find("calls broadcast of 32 bytes") != std::string::npos ||
                       what.find("gave up") != std::string::npos;
    EXPECT_TRUE(named) << what;
  }
  world().everyone()->barrier(kLabel).wait();
}

}  // namespace
}  // namespace titan

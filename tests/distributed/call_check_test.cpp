// debug.check_collectives: when ranks lose their common order, all of them report what each one called.
// Started with --check-collectives; without it (one rank, in the ordinary run) there is nothing to compare. With --nccl, the
// tensors are a GPU's, whose calls are compared on the host.

#include <chrono>
#include <thread>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "distributed/world.h"
#include "titan/core/error.h"
#include "titan/dist/collectives.h"

namespace titan {
namespace {

using dist::ReduceOp;
using ::testing::AllOf;
using ::testing::AnyOf;
using testing::error_of;
using ::testing::HasSubstr;
using testing::options_of;
using testing::world;

constexpr dist::Label kHere = {"fsdp::reduce", "layers.7"};

/// The rank that makes a different call.
bool is_odd_one() { return world().rank() == world().size() - 1; }

/// On a CPU, a group's first call is one of its own, to connect. NCCL connects at the first device tensor, and what
/// compares the calls at its first call: all ranks make one here.
std::shared_ptr<dist::Group> connected(std::shared_ptr<dist::Group> group) {
  if (!testing::device().is_cpu() && group->contains_me())
    group->all_reduce(at::zeros({1}, options_of(at::kFloat)), ReduceOp::Sum, kHere).wait();
  return group;
}

/// Waits for the other ranks without a call, because the next call withdraws what this rank has shown.
void meet_without_calls() {
  c10d::Store& store = world().store();
  const std::string key = str("met/", ::testing::UnitTest::GetInstance()->current_test_info()->name());
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  for (store.add(key, 1); store.add(key, 0) < world().size();) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

class CallCheck : public ::testing::Test {
 protected:
  void SetUp() override {
    if (world().size() == 1) GTEST_SKIP() << "needs a peer";
  }
  /// The test's own group: errors stay inside it.
  std::shared_ptr<dist::Group> group() const {
    return connected(world().group(world().everyone()->ranks(), "checked",
                                   ::testing::UnitTest::GetInstance()->current_test_info()->name()));
  }
  std::string the_others() const { return world().size() == 2 ? "rank 0 calls " : "ranks 0, 1 call "; }
  std::string the_odd_one() const { return str("rank ", world().size() - 1, " calls "); }
};

TEST_F(CallCheck, EqualCallsPass) {
  auto group = this->group();
  const int size = group->size(), rank = group->rank();
  at::Tensor one = at::full({8}, rank + 1.0, options_of(at::kFloat)),
             all = at::zeros({8 * size}, options_of(at::kFloat));
  group->all_gather(all, one, kHere).wait();
  EXPECT_EQ(all.sum().item<double>(), 8.0 * size * (size + 1) / 2);
  group->reduce_scatter(one, all, kHere).wait();
  group->all_reduce(one, ReduceOp::Max, kHere).wait();
  group->broadcast(one, size - 1, kHere).wait();
  group->all_to_all(all, at::ones_like(all), kHere).wait();
  group->barrier(kHere).wait();
  at::Tensor from_left = at::zeros({5}, options_of(at::kFloat));
  const at::Tensor mine = at::full({5}, double(rank), options_of(at::kFloat));
  group->exchange(mine, (rank + 1) % size, from_left, (rank + size - 1) % size, {"pp::exchange"}).wait();
  EXPECT_EQ(from_left[4].item<double>(), (rank + size - 1) % size);
}

// Calls in flight are compared when they are launched.
TEST_F(CallCheck, CallsMayOverlap) {
  auto group = this->group();
  std::vector<at::Tensor> outs;
  std::vector<dist::Work> works;
  for (int call = 0; call < 8; ++call) {
    outs.push_back(at::zeros({group->size() * 100}, options_of(at::kFloat)));
    works.push_back(
        group->all_gather(outs.back(), at::full({100}, double(call), options_of(at::kFloat)), kHere));
  }
  for (auto& work : works) work.wait();
  for (int call = 0; call < 8; ++call)
    EXPECT_EQ(outs[call].sum().item<double>(), 100.0 * call * group->size());
}

TEST_F(CallCheck, ReportsADifferentOperation) {
  auto group = this->group();
  at::Tensor tensor = at::zeros({8}, options_of(at::kFloat));
  const std::string error = error_of([&] {
    if (is_odd_one()) group->broadcast(tensor, 0, {"metrics::loss"}).wait();
    group->all_reduce(tensor, ReduceOp::Sum, kHere).wait();
  });
  EXPECT_THAT(error,
              AllOf(HasSubstr("don't make the same call"),
                    HasSubstr(the_others() + "all_reduce #1 (sum) of Float [8] in fsdp::reduce of layers.7"),
                    HasSubstr(the_odd_one() + "broadcast #1 from its rank 0 of Float [8] in metrics::loss")));
}

TEST_F(CallCheck, ReportsADifferentShape) {
  auto group = this->group();
  at::Tensor tensor = at::zeros({is_odd_one() ? 9 : 8}, options_of(at::kFloat));
  const std::string error = error_of([&] { group->all_reduce(tensor, ReduceOp::Sum, kHere).wait(); });
  EXPECT_THAT(error, AllOf(HasSubstr(the_others() + "all_reduce #1 (sum) of Float [8]"),
                           HasSubstr(the_odd_one() + "all_reduce #1 (sum) of Float [9]")));
}

TEST_F(CallCheck, ReportsADifferentDtype) {
  auto group = this->group();
  at::Tensor tensor = at::zeros({8}, options_of(is_odd_one() ? at::kDouble : at::kFloat));
  const std::string error = error_of([&] { group->all_reduce(tensor, ReduceOp::Sum, kHere).wait(); });
  EXPECT_THAT(error, AllOf(HasSubstr(the_others() + "all_reduce #1 (sum) of Float [8]"),
                           HasSubstr(the_odd_one() + "all_reduce #1 (sum) of Double [8]")));
}

TEST_F(CallCheck, ReportsADifferentReduction) {
  auto group = this->group();
  at::Tensor tensor = at::zeros({8}, options_of(at::kFloat));
  const std::string error = error_of(
      [&] { group->all_reduce(tensor, is_odd_one() ? ReduceOp::Max : ReduceOp::Sum, kHere).wait(); });
  EXPECT_THAT(error, AllOf(HasSubstr("(sum)"), HasSubstr("(max)")));
}

// A rank skips a layer: the same operation and sizes, elsewhere in the program.
TEST_F(CallCheck, ReportsASkippedCallAmongEqualOnes) {
  auto group = this->group();
  at::Tensor tensor = at::zeros({8}, options_of(at::kFloat));
  const std::string error = error_of([&] {
    if (!is_odd_one()) group->all_reduce(tensor, ReduceOp::Sum, {"fsdp::reduce", "layers.1"}).wait();
    group->all_reduce(tensor, ReduceOp::Sum, {"fsdp::reduce", "layers.0"}).wait();
  });
  EXPECT_THAT(error, AllOf(HasSubstr("of layers.1"), HasSubstr("of layers.0")));
}

TEST_F(CallCheck, MissingCallTimesOut) {
  auto group = this->group();
  group->set_timeout(std::chrono::milliseconds(500));
  if (is_odd_one()) {
    std::this_thread::sleep_for(std::chrono::seconds(2));  // it waits in no other call meanwhile
  } else {
    at::Tensor tensor = at::zeros({8}, options_of(at::kFloat));
    const std::string error = error_of([&] { group->all_reduce(tensor, ReduceOp::Sum, kHere).wait(); });
    EXPECT_THAT(error,
                AllOf(HasSubstr("all_reduce #1 in group 'checked'"), HasSubstr("fsdp::reduce layers.7"),
                      HasSubstr("not all ranks of the group made the call")));
  }
  world().everyone()->barrier(kHere).wait();
}

std::string all_reduce_in(const char* group, const std::string& ranks) {
  return str("all_reduce #1 (sum) of Float [8] in fsdp::reduce of layers.7 in group '", group, "' of ranks ",
             ranks);
}

TEST_F(CallCheck, NamesRanksThatWaitForEachOtherInDifferentGroups) {
  const std::vector<int> ranks = world().everyone()->ranks();
  const auto mine = group(), other = connected(world().group(ranks, "other", "other"));
  // Longer than the test needs; calls that were abandoned end after it.
  for (const auto& each : {mine, other}) each->set_timeout(std::chrono::seconds(20));
  at::Tensor tensor = at::zeros({8}, options_of(at::kFloat));
  const auto start = std::chrono::steady_clock::now();
  const std::string error =
      error_of([&] { (is_odd_one() ? other : mine)->all_reduce(tensor, ReduceOp::Sum, kHere).wait(); });
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10))
      << "it waits for no time limit";
  const std::string all = list_str(ranks);
  EXPECT_THAT(error, AllOf(HasSubstr("don't make the same call"),
                           HasSubstr(str("rank ", world().rank(), " calls ",
                                         all_reduce_in(is_odd_one() ? "other" : "checked", all))),
                           HasSubstr(is_odd_one() ? all_reduce_in("checked", all)
                                                  : the_odd_one() + all_reduce_in("other", all))));
  meet_without_calls();
}

// Each rank waits for the next one, so no two wait for each other.
TEST_F(CallCheck, ATimeOutSaysWhichOtherGroupTheMissingRankWaitsIn) {
  if (world().size() != 3) GTEST_SKIP() << "needs three ranks";
  const int rank = world().rank();
  std::vector<std::shared_ptr<dist::Group>> pairs;
  for (const auto& ranks : {std::vector<int>{0, 1}, {1, 2}, {0, 2}}) {
    pairs.push_back(connected(world().group(ranks, str("pair", pairs.size()), "ring")));
    pairs.back()->set_timeout(std::chrono::seconds(2));
  }
  at::Tensor tensor = at::zeros({8}, options_of(at::kFloat));
  const std::string error =
      error_of([&] { pairs[static_cast<size_t>(rank)]->all_reduce(tensor, ReduceOp::Sum, kHere).wait(); });
  const std::vector<std::string> next = {"rank 1 calls " + all_reduce_in("pair1", "1, 2"),
                                         "rank 2 calls " + all_reduce_in("pair2", "0, 2"),
                                         "rank 0 calls " + all_reduce_in("pair0", "0, 1")};
  EXPECT_THAT(error, AllOf(HasSubstr("not all ranks of the group made the call"),
                           HasSubstr(next[static_cast<size_t>(rank)])));
  meet_without_calls();
}

// Ranks may wait longer than a second in calls of different groups, as long as somebody makes progress.
TEST_F(CallCheck, ALateRankIsNoDifference) {
  const auto mine = group();
  at::Tensor tensor = at::ones({8}, options_of(at::kFloat));
  if (is_odd_one()) std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  mine->all_reduce(tensor, ReduceOp::Sum, kHere).wait();
  world().everyone()->barrier(kHere).wait();
  EXPECT_EQ(tensor[0].item<int>(), world().size());
}

// The receiver reports it; the sender has moved on, and learns of it when its next send finds no receiver.
TEST_F(CallCheck, ReportsAReceiveThatDiffersFromTheSend) {
  if (!testing::device().is_cpu())
    GTEST_SKIP() << "NCCL's hosts don't wait for each other, and its calls would never end";
  auto group = this->group();
  // Only the sender waits for a rank that won't come.
  if (world().rank() == 0) group->set_timeout(std::chrono::milliseconds(500));
  at::Tensor eight = at::zeros({8}, options_of(at::kFloat)), nine = at::zeros({9}, options_of(at::kFloat));
  std::string error = "none of the two";
  if (world().rank() == 0) error = error_of([&] { group->send(eight, 1, {"pp::send"}).wait(); });
  if (world().rank() == 1) {
    error = error_of([&] { group->receive(nine, 0, {"pp::receive"}).wait(); });
    EXPECT_THAT(error, AllOf(HasSubstr("rank 0 calls send #0 of Float [8] in pp::send"),
                             HasSubstr("rank 1 calls receive #0 of Float [9] in pp::receive")));
  }
  world().everyone()->barrier(kHere).wait();
}

}  // namespace
}  // namespace titan

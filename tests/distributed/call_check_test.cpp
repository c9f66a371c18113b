// debug.check_collectives: when ranks lose their common order, all of them report what each one called.
// Started with --check-collectives; without it (one rank, in the ordinary run) there is nothing to compare.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

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
using testing::world;

constexpr dist::Label kHere = {"fsdp::reduce", "layers.7"};

/// The rank that makes a different call.
bool is_odd_one() { return world().rank() == world().size() - 1; }

class CallCheck : public ::testing::Test {
 protected:
  void SetUp() override {
    if (world().size() == 1) GTEST_SKIP() << "needs a peer";
  }
  /// The test's own group: errors stay inside it.
  std::shared_ptr<dist::Group> group() const {
    return world().group(world().everyone()->ranks(), "checked",
                         ::testing::UnitTest::GetInstance()->current_test_info()->name());
  }
  std::string the_others() const { return world().size() == 2 ? "rank 0 calls " : "ranks 0, 1 call "; }
  std::string the_odd_one() const { return str("rank ", world().size() - 1, " calls "); }
};

TEST_F(CallCheck, EqualCallsPass) {
  auto group = this->group();
  const int size = group->size(), rank = group->rank();
  at::Tensor one = at::full({8}, rank + 1.0), all = at::zeros({8 * size});
  group->all_gather(all, one, kHere).wait();
  EXPECT_EQ(all.sum().item<double>(), 8.0 * size * (size + 1) / 2);
  group->reduce_scatter(one, all, kHere).wait();
  group->all_reduce(one, ReduceOp::Max, kHere).wait();
  group->broadcast(one, size - 1, kHere).wait();
  group->all_to_all(all, at::ones_like(all), kHere).wait();
  group->barrier(kHere).wait();
  at::Tensor from_left = at::zeros({5});
  dist::Work receive = group->receive(from_left, (rank + size - 1) % size, {"pp::receive"});
  dist::Work send = group->send(at::full({5}, double(rank)), (rank + 1) % size, {"pp::send"});
  receive.wait();
  send.wait();
  EXPECT_EQ(from_left[4].item<double>(), (rank + size - 1) % size);
}

// Calls in flight are compared when they are launched.
TEST_F(CallCheck, CallsMayOverlap) {
  auto group = this->group();
  std::vector<at::Tensor> outs;
  std::vector<dist::Work> works;
  for (int call = 0; call < 8; ++call) {
    outs.push_back(at::zeros({group->size() * 100}));
    works.push_back(group->all_gather(outs.back(), at::full({100}, double(call)), kHere));
  }
  for (auto& work : works) work.wait();
  for (int call = 0; call < 8; ++call)
    EXPECT_EQ(outs[call].sum().item<double>(), 100.0 * call * group->size());
}

TEST_F(CallCheck, ReportsADifferentOperation) {
  auto group = this->group();
  at::Tensor tensor = at::zeros({8});
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
  at::Tensor tensor = at::zeros({is_odd_one() ? 9 : 8});
  const std::string error = error_of([&] { group->all_reduce(tensor, ReduceOp::Sum, kHere).wait(); });
  EXPECT_THAT(error, AllOf(HasSubstr(the_others() + "all_reduce #1 (sum) of Float [8]"),
                           HasSubstr(the_odd_one() + "all_reduce #1 (sum) of Float [9]")));
}

TEST_F(CallCheck, ReportsADifferentDtype) {
  auto group = this->group();
  at::Tensor tensor = at::zeros({8}, is_odd_one() ? at::kDouble : at::kFloat);
  const std::string error = error_of([&] { group->all_reduce(tensor, ReduceOp::Sum, kHere).wait(); });
  EXPECT_THAT(error, AllOf(HasSubstr(the_others() + "all_reduce #1 (sum) of Float [8]"),
                           HasSubstr(the_odd_one() + "all_reduce #1 (sum) of Double [8]")));
}

TEST_F(CallCheck, ReportsADifferentReduction) {
  auto group = this->group();
  at::Tensor tensor = at::zeros({8});
  const std::string error = error_of(
      [&] { group->all_reduce(tensor, is_odd_one() ? ReduceOp::Max : ReduceOp::Sum, kHere).wait(); });
  EXPECT_THAT(error, AllOf(HasSubstr("(sum)"), HasSubstr("(max)")));
}

// A rank skips a layer: the same operation and sizes, elsewhere in the program.
TEST_F(CallCheck, ReportsASkippedCallAmongEqualOnes) {
  auto group = this->group();
  at::Tensor tensor = at::zeros({8});
  const std::string error = error_of([&] {
    if (!is_odd_one()) group->all_reduce(tensor, ReduceOp::Sum, {"fsdp::reduce", "layers.1"}).wait();
    group->all_reduce(tensor, ReduceOp::Sum, {"fsdp::reduce", "layers.0"}).wait();
  });
  EXPECT_THAT(error, AllOf(HasSubstr("of layers.1"), HasSubstr("of layers.0")));
}

TEST_F(CallCheck, MissingCallTimesOut) {
  auto group = this->group();
  group->set_timeout(std::chrono::milliseconds(500));
  if (!is_odd_one()) {
    at::Tensor tensor = at::zeros({8});
    const std::string error = error_of([&] { group->all_reduce(tensor, ReduceOp::Sum, kHere).wait(); });
    EXPECT_THAT(error,
                AllOf(HasSubstr("all_reduce #1 in group 'checked'"), HasSubstr("fsdp::reduce layers.7"),
                      HasSubstr("not all ranks of the group made the call")));
  }
  world().everyone()->barrier(kHere).wait();
}

// The receiver reports it; the sender has moved on, and learns of it when its next send finds no receiver.
TEST_F(CallCheck, ReportsAReceiveThatDiffersFromTheSend) {
  auto group = this->group();
  // Only the sender waits for a rank that won't come.
  if (world().rank() == 0) group->set_timeout(std::chrono::milliseconds(500));
  at::Tensor eight = at::zeros({8}), nine = at::zeros({9});
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

// The comparison of calls (debug.check_collectives), with a peer that is only a record in the store.

#include <gmock/gmock.h>

#include <chrono>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "dist/backends.h"
#include "dist/flight_record.h"

namespace titan::dist {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

/// Done after a while, as after the process has stood still: the peers have what they need from this rank.
class LateWork : public c10d::Work {
 public:
  explicit LateWork(Clock::duration delay) : end_(Clock::now() + delay) {}
  bool isCompleted() override { return Clock::now() >= end_; }
  bool wait(std::chrono::milliseconds) override { return true; }

 private:
  Clock::time_point end_;
};

/// The peer makes the same calls.
class LateBackend : public c10d::Backend {
 public:
  explicit LateBackend(Clock::duration delay) : Backend(0, 2), delay_(delay) {}
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& out, at::Tensor& in,
                                                 const c10d::AllgatherOptions& options) override {
    peer_->_allgather_base(out, in, options)->wait();
    return c10::make_intrusive<LateWork>(delay_);
  }

 private:
  BackendPtr peer_ = make_fake_group(0, 2);
  Clock::duration delay_;
};

/// Compares a call of group 'dp' with rank 1, which waits for this rank, 0, in group 'tp'. The first look at
/// rank 1's call follows after 100 ms.
void check_call(Clock::duration gather_takes) {
  FlightRecorder recorder(4);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  CallRecord mine, theirs;
  mine.group = recorder.add_group("dp", "", {0, 1});
  theirs.group = recorder.add_group("tp", "", {0, 1});
  WaitingCalls(store, 1).show(theirs);
  GroupSpec spec;
  spec.store = store;
  spec.rank = 0;
  spec.size = 2;
  spec.timeout = 400ms;
  LateBackend backend(gather_takes);
  CallChecker(spec, {0, 1}, std::make_shared<WaitingCalls>(store, 0)).check(mine, backend);
}

TEST(CallChecker, ARankThatStoodStillWhileItsPeersWentOnIsNoDifference) {
  EXPECT_NO_THROW(check_call(250ms));
}

TEST(CallChecker, ReportsAPeerThatStillWaitsInAnotherGroup) {
  EXPECT_THAT([] { check_call(60s); },
              ThrowsMessage<Error>(AllOf(HasSubstr("rank 0 calls all_gather #0 in group 'dp'"),
                                         HasSubstr("rank 1 calls all_gather #0 in group 'tp'"))));
}

}  // namespace
}  // namespace titan::dist

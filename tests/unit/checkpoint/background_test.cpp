// The threads of the checkpointer: how they wait for each other, and how exceptions reach the caller.

#include "checkpoint/save/checkpointer_impl.h"

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include <gtest/gtest.h>

#include "checkpoint/save/rank_tree.h"
#include "core/threads.h"
#include "titan/core/error.h"

namespace titan::checkpoint::detail {
namespace {

using std::chrono::milliseconds;

bool never() { return false; }

TEST(Background, RunsJobsOneAfterTheOther) {
  std::atomic<int> sum = 0;
  Background background;
  EXPECT_FALSE(background.busy());
  for (int job = 1; job <= 100; ++job) {
    background.start([&sum, job] { sum += job; });
    EXPECT_TRUE(background.wait(never));
    EXPECT_FALSE(background.busy());
    EXPECT_EQ(sum, job * (job + 1) / 2);
  }
}

TEST(Background, ReleasesAJobsObjectsBeforeItIsDone) {
  Background background;
  const auto held = std::make_shared<int>(1);
  std::atomic<bool> may_end = false;
  background.start([held, &may_end] {
    while (!may_end) std::this_thread::sleep_for(milliseconds(1));
  });
  EXPECT_TRUE(background.busy());
  may_end = true;
  EXPECT_TRUE(background.wait(never));
  EXPECT_EQ(held.use_count(), 1);
}

// A rank's file system may hang: nothing waits for its job forever, not even the destructor.
TEST(Background, AbandonsAHangingJob) {
  const auto ended = std::make_shared<std::atomic<bool>>(false);
  const auto may_end = std::make_shared<std::atomic<bool>>(false);
  {
    Background background;
    background.start([=] {
      while (!*may_end) std::this_thread::sleep_for(milliseconds(1));
      *ended = true;
    });
    EXPECT_FALSE(background.wait([] { return true; }));
    EXPECT_TRUE(background.busy());
  }
  EXPECT_FALSE(*ended);
  *may_end = true;
  while (!*ended) std::this_thread::sleep_for(milliseconds(1));
}

TEST(Within, ReturnsWhetherTheCallFinishedInTime) {
  bool called = false;
  EXPECT_TRUE(within(std::chrono::hours(1), [&] { called = true; }));
  EXPECT_TRUE(called);
  EXPECT_THROW(within(std::chrono::hours(1), [] { throw Error("no"); }), Error);
  const auto may_end = std::make_shared<std::atomic<bool>>(false);
  EXPECT_FALSE(within(milliseconds(5), [may_end] {
    while (!*may_end) std::this_thread::sleep_for(milliseconds(1));
  }));
  *may_end = true;
}

TEST(Within, ReleasesTheCallsObjectsBeforeItReturns) {
  for (int i = 0; i < 100; ++i) {
    auto held = std::make_shared<int>(1);
    const std::weak_ptr<int> watched = held;
    EXPECT_TRUE(within(std::chrono::hours(1), [held = std::move(held)] {}));
    EXPECT_TRUE(watched.expired());
  }
}

TEST(RunTasks, RunsEachTaskOnce) {
  for (const int threads : {0, 1, 3, 50}) {
    std::vector<std::atomic<int>> done(20);
    run_tasks(threads, done.size(), [&](size_t task) { ++done[task]; });
    for (const auto& count : done) EXPECT_EQ(count, 1);
  }
  run_tasks(4, 0, [](size_t) { FAIL(); });
}

TEST(RunTasks, RethrowsAndStartsNoFurtherTask) {
  std::atomic<int> begun = 0;
  const auto task = [&](size_t index) {
    ++begun;
    if (index == 3) throw Error("task 3");
    std::this_thread::sleep_for(milliseconds(1));
  };
  EXPECT_THROW(run_tasks(2, 1000, task), Error);
  EXPECT_LT(begun, 1000);
}

TEST(Wire, RoundTripsNumbersAndTexts) {
  WireWriter out;
  out(-5);
  out(std::string("a\0b", 3));
  out(std::string());
  const std::string bytes = out.take();
  WireReader in(bytes);
  EXPECT_EQ(in.get<int64_t>(), -5);
  EXPECT_EQ(in.get<std::string>(), std::string("a\0b", 3));
  EXPECT_FALSE(in.done());
  EXPECT_EQ(in.get<std::string>(), "");
  EXPECT_TRUE(in.done());
  EXPECT_THROW(in.get<int64_t>(), Error);
  WireReader cut(std::string_view(bytes).substr(0, 17));
  cut.get<int64_t>();
  EXPECT_THROW(cut.get<std::string>(), Error);
}

}  // namespace
}  // namespace titan::checkpoint::detail

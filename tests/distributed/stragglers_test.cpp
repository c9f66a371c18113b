// A rank that is slow on purpose: own times, waits, and when it is named.

#include <chrono>
#include <thread>

#include <gtest/gtest.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include "distributed/world.h"
#include "observe/stragglers.h"
#include "titan/dist/collectives.h"
#include "titan/train/run_observer.h"

namespace titan::train {
namespace {

using titan::testing::world;

constexpr int kSteps = 2;  // in an interval
constexpr double kShort_s = 0.02, kLong_s = 0.42;

void work_for(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

/// Stands for the trainer's next exchange between hosts.
void exchange(StragglerWatch& watch) {
  if (watch.figures().empty()) return;
  const at::Tensor mine = at::tensor(watch.figures(), at::kDouble);
  at::Tensor all = at::empty({world().size() * mine.numel()}, at::kDouble);
  world().everyone()->all_gather(all, mine, {"test::figures"}).wait();
  watch.receive_figures({all.const_data_ptr<double>(), all.const_data_ptr<double>() + all.numel()});
  EXPECT_TRUE(watch.figures().empty());
}

/// One interval of a training loop in which rank `slow` takes longer (-1: none), for its data or for its
/// forward.
void run_interval(StragglerWatch& watch, int slow, int64_t& step, Phase where = Phase::ForwardBackward) {
  const double mine = world().rank() == slow ? kLong_s : kShort_s;
  for (int i = 0; i < kSteps; ++i) {
    watch.begin(Phase::Step, ++step);
    watch.begin(Phase::Data, step);
    if (where == Phase::Data) work_for(mine);
    watch.end(Phase::Data, step, false);
    if (where == Phase::Data) world().everyone()->sum(1.0, {"test::tokens"});
    watch.begin(Phase::ForwardBackward, step);
    if (where == Phase::ForwardBackward) {
      work_for(mine);
      world().everyone()->sum(1.0, {"test::gradients"});
    }
    watch.end(Phase::ForwardBackward, step, false);
    watch.end(Phase::Step, step, false);
  }
  StepMetrics metrics;
  metrics.step = step;
  watch.logged(metrics);
  exchange(watch);
}

int named(const StragglerWatch& watch) { return watch.straggler() ? watch.straggler()->rank : -1; }

TEST(Stragglers, NamesASlowRankUntilItRecovers) {
  StragglerWatch watch(world(), /*stage=*/0, {.ratio = 2, .intervals = 2}, nullptr);
  const int slow = world().size() - 1;
  int64_t step = 0;
  run_interval(watch, slow, step);  // the first includes set-up
  EXPECT_TRUE(watch.paces().empty());
  run_interval(watch, slow, step);
  EXPECT_EQ(named(watch), -1);  // once isn't enough
  run_interval(watch, slow, step);
  EXPECT_EQ(named(watch), slow);

  ASSERT_EQ(watch.paces().size(), static_cast<size_t>(world().size()));
  const RankPace &fast = watch.paces()[0], &last = watch.paces()[static_cast<size_t>(slow)];
  EXPECT_GE(last.own_s, kLong_s);
  EXPECT_GE(fast.own_s, kShort_s);
  EXPECT_LT(fast.own_s, last.own_s / 2);
  // The others wait for as long.
  EXPECT_GT(fast.wait_s, (kLong_s - kShort_s) / 2);
  EXPECT_LT(last.wait_s, fast.wait_s);

  for (int i = 0; i < 10 && named(watch) == slow; ++i) run_interval(watch, -1, step);
  EXPECT_NE(named(watch), slow);
}

// The others wait where the ranks' tokens are counted.
TEST(Stragglers, NamesARankWithSlowData) {
  StragglerWatch watch(world(), 0, {.ratio = 2, .intervals = 1}, nullptr);
  const int slow = world().size() - 1;
  int64_t step = 0;
  for (int i = 0; i < 2; ++i) run_interval(watch, slow, step, Phase::Data);
  EXPECT_EQ(named(watch), slow);
  const RankPace &fast = watch.paces()[0], &last = watch.paces()[static_cast<size_t>(slow)];
  EXPECT_GE(last.own_s, kLong_s);
  EXPECT_GT(fast.wait_s, (kLong_s - kShort_s) / 2);
  EXPECT_LT(last.wait_s, fast.wait_s);
  EXPECT_GE(fast.step_s, kLong_s / 2);
}

// Another rank each interval: none of them holds the others up.
TEST(Stragglers, StopsNamingTheFirstWhenRanksTakeTurns) {
  const int last = world().size() - 1;
  if (last < 2) GTEST_SKIP() << "of two ranks one is always the slower";
  StragglerWatch watch(world(), 0, {.ratio = 2, .intervals = 2}, nullptr);
  int64_t step = 0;
  for (int i = 0; i < 3; ++i) run_interval(watch, last, step);
  ASSERT_EQ(named(watch), last);
  run_interval(watch, 0, step);
  run_interval(watch, 1, step);
  EXPECT_EQ(named(watch), -1);
}

// A slow rank with a stage of its own does other work than the rest.
TEST(Stragglers, ComparesTheRanksOfAStage) {
  const int slow = world().size() - 1;
  StragglerWatch watch(world(), world().rank() == slow ? 1 : 0, {.ratio = 2, .intervals = 1}, nullptr);
  int64_t step = 0;
  for (int i = 0; i < 2; ++i) run_interval(watch, slow, step);
  EXPECT_NE(named(watch), slow);
  ASSERT_EQ(watch.paces().size(), static_cast<size_t>(world().size()));
  for (int rank = 0; rank <= slow; ++rank)
    EXPECT_EQ(watch.paces()[static_cast<size_t>(rank)].stage, rank == slow);
}

}  // namespace
}  // namespace titan::train

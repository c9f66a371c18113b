// Ranks communicate through the store: all of them learn of one that hangs. tests/e2e/hang_test.cpp tests
// whole jobs.

#include "titan/guard/watchdog.h"

#include <gmock/gmock.h>

#include <future>
#include <thread>

#include "dist/flight_record.h"
#include "distributed/world.h"
#include "titan/core/error.h"
#include "titan/dist/collectives.h"

namespace titan::testing {
namespace {

using namespace std::chrono_literals;
using dist::ProgressKind;
using dist::Watchdog;
using dist::WatchdogOptions;
using ::testing::AllOf;
using ::testing::HasSubstr;

WatchdogOptions options_within(std::chrono::milliseconds time, std::promise<std::string>& verdict) {
  return {
      .limits = {.data = {time, "data.limit"}, .compute = {time}, .checkpoint = {time}, .validation = {time}},
      .on_hang = [&verdict](const std::string& text) { verdict.set_value(text); }};
}

/// Reports progress until there is a verdict or `limit` is over.
std::string keep_working(Watchdog& watchdog, std::future<std::string>& verdict,
                         std::chrono::milliseconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (std::chrono::steady_clock::now() < end) {
    watchdog.progress(ProgressKind::Compute, "step", 3);
    if (verdict.wait_for(10ms) == std::future_status::ready) return verdict.get();
  }
  return "";
}

// Any rank, including the one that reaches the verdicts.
TEST(Watchdog, AllRanksLearnOfAHungRank) {
  for (int culprit = 0; culprit < world().size(); ++culprit) {
    std::promise<std::string> promise;
    auto verdict = promise.get_future();
    std::string text;
    {
      WatchdogOptions options = options_within(1s, promise);
      // Also the limit of silence: a rank that gets no processor for a while isn't lost.
      options.limits.compute.time = 60s;
      Watchdog watchdog(world(), options);
      if (world().rank() == culprit) {
        watchdog.progress(ProgressKind::Data, "batch", 3);
        if (verdict.wait_for(60s) == std::future_status::ready) text = verdict.get();
      } else {
        text = keep_working(watchdog, verdict, 60s);
      }
    }
    EXPECT_THAT(text, AllOf(HasSubstr(str("rank ", culprit, " of ", world().size(), " (")),
                            HasSubstr("hangs in batch of step 3, without progress for "),
                            HasSubstr("limit 1 s, data.limit")));
    for (const std::string& other : world().everyone()->all_gather_text(text, {"test"}))
      EXPECT_EQ(other, text);
  }
}

TEST(Watchdog, ToleratesAFinishedRank) {
  std::promise<std::string> promise;
  auto verdict = promise.get_future();
  {
    Watchdog watchdog(world(), options_within(2s, promise));
    EXPECT_EQ(keep_working(watchdog, verdict, world().rank() == 0 ? 300ms : 5s), "");
  }
  world().everyone()->barrier({"test"}).wait();
}

TEST(Watchdog, ToleratesAWaitWhileAnotherRankSaves) {
  std::promise<std::string> promise;
  auto verdict = promise.get_future();
  WatchdogOptions options = options_within(2s, promise);
  options.limits.checkpoint.time = 60s;
  {
    Watchdog watchdog(world(), options);
    const bool saves = world().rank() == world().size() - 1;
    watchdog.progress(saves ? ProgressKind::Checkpoint : ProgressKind::Compute, saves ? "save" : "step", 3);
    if (saves) std::this_thread::sleep_for(5s);
    // It computes before it joins the others, whose last reports are from earlier.
    if (saves) watchdog.progress(ProgressKind::Compute, "step", 3);
    if (saves) std::this_thread::sleep_for(300ms);
    world().everyone()->barrier({"test::others_wait"}).wait();
    EXPECT_NE(verdict.wait_for(0s), std::future_status::ready) << verdict.get();
    watchdog.progress(ProgressKind::Idle, "end");
  }
  world().everyone()->barrier({"test"}).wait();
}

// Rank 0 needs a while to clean up; until then the others only know that their calls failed. An earlier call
// of rank 0 failed, too, which was no reason to end.
TEST(Watchdog, NamesTheCauseOfAFailureNotItsFirstEffect) {
  if (world().size() == 1) GTEST_SKIP() << "needs peers";
  Watchdog watchdog(world(), {.judges = false});
  const bool is_culprit = world().rank() == 0;
  const auto group = world().group(world().everyone()->ranks(), "survived", "watchdog_test");
  std::string error = "no space left";
  if (is_culprit) {
    dist::FlightRecorder& recorder = world().recorder();
    recorder.finish(recorder.start({}), dist::CallState::Failed);
    std::this_thread::sleep_for(700ms);
  } else {
    group->set_timeout(200ms);
    error = error_of([&] { group->barrier({"test"}).wait(); });
  }
  const auto start = std::chrono::steady_clock::now();
  const dist::Explanation why = watchdog.explain(error);
  EXPECT_EQ(why.text, "rank 0 failed: no space left");
  EXPECT_EQ(why.told_by, 0);
  EXPECT_TRUE(why.covers_own_error);
  EXPECT_EQ(why.is_about_peer, !is_culprit);
  if (!is_culprit) EXPECT_GT(std::chrono::steady_clock::now() - start, 1500ms) << "launchers blame the first";
}

}  // namespace
}  // namespace titan::testing

#include <gmock/gmock.h>
#include <atomic>
#include <ctime>
#include <fstream>
#include <future>
#include <thread>

#include "guard/progress.h"
#include "titan/core/error.h"
#include "titan/guard/watchdog.h"

namespace titan::dist {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kInterval = 500;

/// A beat at step 7 of a training with limits of five seconds.
RankView rank_at(int rank, ProgressKind kind, const char* what, int64_t stalled_ms,
                 const std::string& call = "") {
  Beat beat{.kind = kind, .what = what, .step = 7, .stalled_ms = stalled_ms, .limit_ms = 5000};
  beat.setting = beat.silence_setting = "comm.train_timeout_seconds";
  beat.silence_limit_ms = 5000;
  beat.call = call;
  beat.pid = 100 + rank;
  beat.host = "node";
  return {rank, beat, 0, ""};
}

RankView waiting(int rank, int64_t stalled_ms) {
  return rank_at(rank, ProgressKind::Compute, "forward_backward", stalled_ms, "all_gather #3 of group 'dp'");
}

RankView working(int rank) { return rank_at(rank, ProgressKind::Compute, "forward_backward", 0); }

TEST(WatchdogVerdict, LeavesAProgressingRankAlone) {
  EXPECT_FALSE(judge({working(0)}, 1, kInterval));
  EXPECT_FALSE(judge({working(0), waiting(1, 4900)}, 2, kInterval));
  EXPECT_FALSE(judge({rank_at(0, ProgressKind::Idle, "prompt", 900'000)}, 1, kInterval));
}

TEST(WatchdogVerdict, NamesASilentRankBeforeRanksThatWaitForIt) {
  RankView silent = working(1);
  silent.silent_ms = 5200;
  silent.process = "stopped by a signal";
  const auto verdict = judge({waiting(0, 5100), silent, waiting(2, 5100)}, 3, kInterval);
  ASSERT_TRUE(verdict);
  EXPECT_THAT(verdict->text,
              HasSubstr("rank 1 of 3 (node, pid 101) has given no sign of life for 5.2 s (limit 5 s, "
                        "comm.train_timeout_seconds), last seen in forward_backward of step 7; its process "
                        "is stopped by a signal. rank 0 waits in all_gather #3 of group 'dp', in "
                        "forward_backward of step 7, for 5.1 s"));
  EXPECT_THAT(verdict->text, Not(HasSubstr("\n")));
  EXPECT_THAT(verdict->silent, ElementsAre(1));
  EXPECT_THAT(verdict->culprits, ElementsAre(1));
}

// A silent process is frozen: one that loads data would still send beats.
TEST(WatchdogVerdict, UsesTheComputeLimitForSilence) {
  RankView silent = rank_at(1, ProgressKind::Data, "data", 0);
  silent.beat->limit_ms = 600'000;
  silent.beat->setting = "comm.data_timeout_seconds";
  silent.silent_ms = 4900;
  EXPECT_FALSE(judge({waiting(0, 4900), silent}, 2, kInterval));
  silent.silent_ms = 5200;
  const auto verdict = judge({waiting(0, 5100), silent}, 2, kInterval);
  ASSERT_TRUE(verdict);
  EXPECT_THAT(verdict->text,
              HasSubstr("(limit 5 s, comm.train_timeout_seconds), last seen in data of step 7"));
}

TEST(WatchdogVerdict, AllowsABeatToBeOneIntervalLate) {
  RankView late = rank_at(1, ProgressKind::Compute, "forward_backward", 4800);
  late.silent_ms = 2 * kInterval;
  EXPECT_FALSE(judge({working(0), late}, 2, kInterval));
}

TEST(WatchdogVerdict, NamesARankThatStallsOutsideACall) {
  const RankView stuck = rank_at(2, ProgressKind::Data, "data", 5001);
  const auto verdict = judge({waiting(0, 4000), waiting(1, 4000), stuck}, 3, kInterval);
  ASSERT_TRUE(verdict);
  EXPECT_THAT(verdict->text, HasSubstr("rank 2 of 3 (node, pid 102) hangs in data of step 7, without "
                                       "progress for 5 s"));
  EXPECT_TRUE(verdict->silent.empty());
  EXPECT_THAT(verdict->culprits, ElementsAre(2));
}

TEST(WatchdogVerdict, NamesAComputingRankThatOthersWaitFor) {
  const auto verdict = judge({waiting(0, 5001), working(1)}, 2, kInterval);
  ASSERT_TRUE(verdict);
  EXPECT_THAT(verdict->text, AllOf(HasSubstr("rank 1 of 2 (node, pid 101) hasn't joined the call that"),
                                   HasSubstr("rank 0 waits in all_gather #3")));
}

TEST(WatchdogVerdict, KeepsAnExcuseForAWhile) {
  RankView saving = rank_at(1, ProgressKind::Checkpoint, "save", 6000);
  saving.beat->limit_ms = saving.beat->silence_limit_ms = 60'000;
  saving.silent_ms = 4 * kInterval;  // its last beat is late
  EXPECT_TRUE(has_excuse({waiting(0, 5001), saving}, kInterval));
  EXPECT_FALSE(judge({waiting(0, 5001), saving}, 2, kInterval));
  // It continues, but the last beats of the others are older.
  RankView stale = waiting(0, 30'000);
  stale.unexcused_ms = 1000;
  EXPECT_FALSE(has_excuse({stale, working(1)}, kInterval));
  EXPECT_FALSE(judge({stale, working(1)}, 2, kInterval));
  stale.unexcused_ms = 5001;
  EXPECT_TRUE(judge({stale, working(1)}, 2, kInterval));
}

TEST(WatchdogVerdict, ExcusesWaitsForLoadingSavingAndValidating) {
  for (const auto kind : {ProgressKind::Data, ProgressKind::Checkpoint, ProgressKind::Validation}) {
    RankView other = rank_at(1, kind, "save", 6000);
    other.beat->limit_ms = 60'000;
    EXPECT_FALSE(judge({waiting(0, 5001), other}, 2, kInterval)) << name_of(kind);
    other.beat->stalled_ms = 60'001;
    EXPECT_TRUE(judge({waiting(0, 5001), other}, 2, kInterval)) << name_of(kind);
    // Not if the other rank itself waits in a call.
    EXPECT_TRUE(judge({waiting(0, 5001), rank_at(1, kind, "save", 1000, "broadcast #1")}, 2, kInterval))
        << name_of(kind);
  }
}

TEST(WatchdogVerdict, ExcusesARankUnderADebugger) {
  RankView traced = working(1);
  traced.silent_ms = 100'000;
  traced.beat->traced = true;
  EXPECT_FALSE(judge({waiting(0, 5001), traced}, 2, kInterval));
}

TEST(WatchdogVerdict, NeitherBlamesNorWaitsForARankThatHasLeft) {
  RankView left = working(1);
  left.beat->state = RunState::Left;
  left.silent_ms = 100'000;
  EXPECT_FALSE(judge({working(0), left}, 2, kInterval));
  const auto verdict = judge({rank_at(0, ProgressKind::Checkpoint, "finish", 5001), left}, 2, kInterval);
  ASSERT_TRUE(verdict);
  EXPECT_THAT(verdict->text, HasSubstr("rank 0 of 2 (node, pid 100) hangs in finish"));
  EXPECT_THAT(verdict->silent, ElementsAre(1));
}

// An exception ended its training, and its process ends slowly.
TEST(WatchdogVerdict, NamesARankThatHasLeftIfAllOthersWait) {
  RankView left = working(1);
  left.beat->state = RunState::Left;
  left.silent_ms = 100'000;
  const auto verdict = judge({waiting(0, 5001), left, waiting(2, 5001)}, 3, kInterval);
  ASSERT_TRUE(verdict);
  EXPECT_THAT(verdict->text, HasSubstr("rank 1 of 3 (node, pid 101) has ended its training"));
  EXPECT_THAT(verdict->text, Not(HasSubstr("don't make the same calls")));
  EXPECT_THAT(verdict->culprits, ElementsAre(1));
  EXPECT_THAT(verdict->silent, ElementsAre(1));
}

TEST(WatchdogVerdict, SaysThatARankComputesForever) {
  RankView stuck = rank_at(0, ProgressKind::Compute, "forward_backward", 50'001);
  stuck.beat->computes = true;
  const auto verdict = judge({stuck}, 1, kInterval);
  ASSERT_TRUE(verdict);
  EXPECT_THAT(verdict->text,
              HasSubstr("(limit 5 s, comm.train_timeout_seconds), although its CPUs are busy"));
}

TEST(WatchdogVerdict, NamesARankThatNeverBegan) {
  const auto verdict = judge({waiting(0, 5001), {1, std::nullopt, 0, ""}}, 2, kInterval);
  ASSERT_TRUE(verdict);
  EXPECT_THAT(verdict->text, HasSubstr("rank 1 of 2 hasn't begun to train"));
}

TEST(WatchdogVerdict, FindsDifferentCallsIfAllRanksWait) {
  const auto verdict = judge({waiting(0, 5001), waiting(1, 4000)}, 2, kInterval);
  ASSERT_TRUE(verdict);
  EXPECT_THAT(verdict->text,
              AllOf(HasSubstr("wait for each other"), HasSubstr("rank 0 waits"), HasSubstr("rank 1 waits")));
}

TEST(WatchdogVerdict, KeepsBeatsThroughText) {
  Beat beat = *waiting(3, 17).beat;
  beat.number = 9;
  beat.pids = "boot pid:[1]";
  beat.state = RunState::Left;
  beat.traced = beat.computes = true;
  beat.life = "rank 3 (host node)";
  EXPECT_EQ(to_text(beat_from(to_text(beat))), to_text(beat));
  EXPECT_THROW(beat_from("hello"), Error);
}

TEST(StallClock, CountsOnlyWhatItSees) {
  StallClock clock;
  auto now = StallClock::Clock::now();
  const auto look = [&](std::chrono::milliseconds later, bool moved) {
    clock.look(now += later, moved, 2000ms);
    return clock.stalled().count();
  };
  EXPECT_EQ(look(0ms, false), 0);
  EXPECT_EQ(look(500ms, false), 500);
  EXPECT_EQ(look(500ms, false), 1000);
  EXPECT_EQ(look(500ms, true), 0);
  // The process was stopped for an hour, perhaps like all others.
  EXPECT_EQ(look(3600s, false), 2000);
}

/// The watchdog of a job with one rank, which judges itself.
std::string hang(WatchdogOptions options, const std::function<void(Watchdog&)>& work,
                 std::chrono::milliseconds wait) {
  auto verdict = std::make_shared<std::promise<std::string>>();
  options.on_hang = [verdict](const std::string& text) { verdict->set_value(text); };
  const World world = init({.backend = "gloo", .device = "cpu"});
  auto found = verdict->get_future();
  Watchdog watchdog(world, options);
  work(watchdog);
  return found.wait_for(wait) == std::future_status::ready ? found.get() : "";
}

WatchdogLimits limits_of(std::chrono::milliseconds time) {
  return {.data = {time, "data.limit"}, .compute = {time}, .checkpoint = {time}, .validation = {time}};
}

TEST(Watchdog, FindsAStall) {
  const std::string verdict = hang(
      {.limits = limits_of(300ms)},
      [](Watchdog& watchdog) { watchdog.progress(ProgressKind::Data, "batch", 4); }, 20s);
  EXPECT_THAT(verdict, AllOf(HasSubstr("rank 0 of 1"), HasSubstr("hangs in batch of step 4"),
                             HasSubstr("limit 0.3 s, data.limit")));
}

// Reports progress twenty times as often as required.
TEST(Watchdog, LeavesSlowProgressAlone) {
  const std::string verdict = hang(
      {.limits = limits_of(2s)},
      [](Watchdog& watchdog) {
        watchdog.progress(ProgressKind::Compute, "step", 1);
        for (int i = 0; i < 30; ++i) {
          std::this_thread::sleep_for(100ms);
          watchdog.progress();
        }
        watchdog.progress(ProgressKind::Idle, "prompt");
      },
      0ms);
  EXPECT_EQ(verdict, "");
}

/// False: the machine was too busy for it.
bool compute_for(std::chrono::milliseconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  const std::clock_t before = std::clock();
  volatile double sum = 0;
  while (std::chrono::steady_clock::now() < end)
    for (int i = 0; i < 1000; ++i) sum = sum + i;
  const double worked_s = static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC;
  return worked_s > 0.6 * std::chrono::duration<double>(time).count();
}

/// Limits that are far away, except for the kinds under test.
WatchdogLimits limits_of_work(std::chrono::milliseconds time) {
  WatchdogLimits limits = limits_of(time);
  limits.validation.time = 600s;
  return limits;
}

// With a GPU, the processor works only for reads and writes; otherwise it waits for the device.
TEST(Watchdog, CountsComputingAsProgress) {
  for (const auto& [kind, is_gpu] : {std::pair(ProgressKind::Compute, false),
                                     {ProgressKind::Data, true},
                                     {ProgressKind::Checkpoint, true}}) {
    bool worked = false;
    const std::string verdict = hang(
        {.limits = limits_of_work(1500ms), .computing_is_progress = !is_gpu},
        [&, kind = kind](Watchdog& watchdog) {
          watchdog.progress(kind, "step", 1);
          worked = compute_for(2500ms);
        },
        0ms);
    if (!worked) GTEST_SKIP() << "the machine is too busy";
    EXPECT_EQ(verdict, "") << name_of(kind);
  }
}

/// The verdict on a thread that only computes.
std::string compute_forever(const WatchdogOptions& options) {
  std::atomic<bool> ends{false};
  std::thread computes;
  const std::string verdict = hang(
      options,
      [&](Watchdog& watchdog) {
        watchdog.progress(ProgressKind::Compute, "step", 1);
        computes = std::thread([&] {
          while (!ends) compute_for(10ms);
        });
      },
      60s);
  ends = true;
  computes.join();
  return verdict;
}

TEST(Watchdog, IgnoresAProcessorThatSpinsForAGpu) {
  EXPECT_THAT(compute_forever({.limits = limits_of_work(500ms), .computing_is_progress = false}),
              HasSubstr("hangs in step 1"));
}

// After the longest limit.
TEST(Watchdog, FindsAnEndlessLoopEventually) {
  EXPECT_THAT(compute_forever({.limits = limits_of(500ms)}), HasSubstr("hangs in step 1"));
}

int64_t written_bytes() {
  std::ifstream file("/proc/self/io");
  std::string name;
  int64_t value = 0;
  while (file >> name >> value)
    if (name == "write_bytes:") return value;
  return 0;
}

// A checkpoint on slow storage may take minutes longer than the limit.
TEST(Watchdog, CountsWritesOfASaveAsProgress) {
  const auto path = std::filesystem::path(::testing::TempDir()) / "slow_save";
  const std::string piece(4 << 20, 'x');
  const int64_t before = written_bytes();
  bool was_late = false;
  const std::string verdict = hang(
      {.limits = limits_of(2s)},
      [&](Watchdog& watchdog) {
        watchdog.progress(ProgressKind::Checkpoint, "save", 1);
        for (int i = 0; i < 35; ++i) {
          const auto start = std::chrono::steady_clock::now();
          std::ofstream(path, std::ios::binary) << piece;
          std::this_thread::sleep_for(100ms);
          was_late = was_late || std::chrono::steady_clock::now() - start > 1s;
        }
      },
      0ms);
  std::filesystem::remove(path);
  if (written_bytes() - before < 35 * static_cast<int64_t>(piece.size()))
    GTEST_SKIP() << "the kernel doesn't count what is written there: no storage";
  if (was_late) GTEST_SKIP() << "the machine is too busy";
  EXPECT_EQ(verdict, "");
}

TEST(Watchdog, RemovesStacksOfAnEarlierStart) {
  const auto folder = std::filesystem::path(::testing::TempDir()) / "old_stacks";
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "stacks_0.txt") << "old";
  hang(
      {.limits = limits_of(600s), .folder = folder}, [](Watchdog&) {}, 0ms);
  EXPECT_FALSE(std::filesystem::exists(folder / "stacks_0.txt"));
}

// A reader that sees a phase must also see that it has begun. Otherwise its limit would apply to the previous
// phase's time.
TEST(ProgressCell, ShowsAPhaseOnlyOnceItHasBegun) {
  ProgressCell cell;
  std::atomic<bool> ends{false};
  std::thread trains([&] {
    for (int64_t i = 1; !ends; ++i)
      cell.report(i % 2 ? ProgressKind::Compute : ProgressKind::Data, i % 2 ? "step" : "data", i);
  });
  for (int i = 0; i < 300'000; ++i) {
    const auto reading = cell.read();
    ASSERT_GE(static_cast<int64_t>(reading.count), reading.step);
  }
  ends = true;
  trains.join();
}

TEST(Watchdog, AcceptsNewLimitsWhileItWatches) {
  const std::string verdict = hang(
      {.limits = limits_of(600s)},
      [](Watchdog& watchdog) {
        watchdog.progress(ProgressKind::Checkpoint, "save", 2);
        std::this_thread::sleep_for(50ms);
        watchdog.set_limits(limits_of(300ms));
      },
      20s);
  EXPECT_THAT(verdict, HasSubstr("hangs in save of step 2"));
}

// Prints the cost for a step: a bound that holds on every busy machine would show nothing.
TEST(Watchdog, ReportsProgressWithinNanoseconds) {
  const World world = init({.backend = "gloo", .device = "cpu"});
  Watchdog watchdog(world, {});
  constexpr int kCalls = 1'000'000;
  const std::clock_t start = std::clock();
  for (int i = 0; i < kCalls; ++i) watchdog.progress(ProgressKind::Compute, "step", i);
  const double ns = 1e9 * static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC / kCalls;
  std::printf("{\"ns_per_progress\": %.1f}\n", ns);
  EXPECT_LT(ns, 100) << "ns of processor time: there may be a lock or a system call in it";
}

}  // namespace
}  // namespace titan::dist

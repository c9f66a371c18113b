#include <gtest/gtest.h>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "core/process.h"

namespace titan {
namespace {

TEST(Process, TimeSinceStartGrowsWithTheClock) {
  double before = seconds_since_process_start();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  double after = seconds_since_process_start();
  EXPECT_GE(before, -0.02);  // the start time counts in ticks of 10 ms
  EXPECT_LT(before, 3600);   // neither since boot nor in ticks: the tests before this one take less
  EXPECT_NEAR(after - before, 0.02, 0.5);
  EXPECT_GE(after - before, 0.02);
}

TEST(Process, TimeSinceLaunchIncludesTheLauncher) {
  const double launcher = seconds_since_process_start();
  pass_on_launch_time();
  EXPECT_NEAR(seconds_since_launch() - seconds_since_process_start(), launcher, 0.5);
  for (const char* text : {"no", "-7", "nan", "inf", ""}) {
    ::setenv("TITAN_LAUNCH_SECONDS", text, /*overwrite=*/1);
    EXPECT_NEAR(seconds_since_launch(), seconds_since_process_start(), 0.5) << text;
  }
  ::unsetenv("TITAN_LAUNCH_SECONDS");
  EXPECT_NEAR(seconds_since_launch(), seconds_since_process_start(), 0.5);
}

TEST(Process, ResidentMemoryIsLessThanTheMachines) {
  EXPECT_GT(peak_resident_gib(), 0.001);
  EXPECT_LT(peak_resident_gib(), machine_memory_gib());
}

}  // namespace
}  // namespace titan

#include "train/profile_schedule.h"

#include <string>

#include <gtest/gtest.h>

namespace titan::train {
namespace {

// Of the steps 1 to 12: '.', 'w', 'r' and 's'.
std::string actions(const ProfilingSettings& settings) {
  std::string text;
  for (int64_t step = 1; step <= 12; ++step)
    text += ".wrs"[static_cast<size_t>(profile_action(settings, step))];
  return text;
}

TEST(ProfileSchedule, WaitsWarmsUpAndRecordsTheLastSteps) {
  EXPECT_EQ(actions({.profile_freq = 6, .profiler_active = 2, .profiler_warmup = 1}), "...wrs...wrs");
  EXPECT_EQ(actions({.profile_freq = 4, .profiler_active = 1, .profiler_warmup = 3}), "wwwswwwswwws");
}

TEST(ProfileSchedule, NeedsNoWarmUp) {
  EXPECT_EQ(actions({.profile_freq = 1, .profiler_active = 1, .profiler_warmup = 0}), "ssssssssssss");
  EXPECT_EQ(actions({.profile_freq = 12, .profiler_active = 1, .profiler_warmup = 0}), "...........s");
}

}  // namespace
}  // namespace titan::train

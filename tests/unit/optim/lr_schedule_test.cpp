#include "titan/optim/lr_schedule.h"

#include <gtest/gtest.h>

namespace titan::optim {
namespace {

std::vector<double> factors(const LrSchedulerSettings& settings, int64_t steps) {
  LrSchedule schedule(settings, steps);
  std::vector<double> result;
  for (int64_t step = 0; step < steps; ++step) result.push_back(schedule.factor(step));
  return result;
}

void expect_near(const std::vector<double>& values, const std::vector<double>& expected, double tolerance) {
  ASSERT_EQ(values.size(), expected.size());
  for (size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(values[i], expected[i], tolerance) << "step " << i;
}

LrSchedulerSettings settings(int64_t warmup, std::optional<double> ratio, const char* type = "linear",
                             double floor = 0) {
  return {.warmup_steps = warmup,
          .total_steps = {},
          .decay_ratio = ratio,
          .decay_type = type,
          .min_lr_factor = floor};
}

// The numbers are TorchTitan's.
TEST(LrSchedule, WarmupStableDecay) {
  expect_near(factors(settings(2, 0.8), 10), {.5, 1, 1, .875, .75, .625, .5, .375, .25, .125}, 1e-15);
}

TEST(LrSchedule, WithoutRatioEverythingAfterTheWarmupDecays) {
  expect_near(factors(settings(2, {}), 10), {.5, 1, 1, .875, .75, .625, .5, .375, .25, .125}, 1e-15);
}

TEST(LrSchedule, DecayShapesWithAFloor) {
  auto last_four = [](const char* type) {
    auto all = factors(settings(2, 0.5, type, 0.1), 10);
    return std::vector<double>(all.end() - 4, all.end());
  };
  expect_near(last_four("linear"), {.82, .64, .46, .28}, 1e-12);
  expect_near(last_four("sqrt"), {.59751, .43079, .30286, .19502}, 5e-6);
  expect_near(last_four("cosine"), {.91406, .68906, .41094, .18594}, 5e-6);
}

TEST(LrSchedule, WarmupAndDecayAreCutToTheSchedule) {
  expect_near(factors(settings(200, {}), 4), {.25, .5, .75, 1}, 1e-15);
  expect_near(factors(settings(2, 1.0), 4), {.5, 1, 1, .5}, 1e-15);
}

TEST(LrSchedule, HalvesRoundToEvenAsInPython) {
  // 5 * 0.5 = 2.5 rounds to 2 decaying steps, 7 * 0.5 = 3.5 to 4.
  expect_near(factors(settings(0, 0.5), 5), {1, 1, 1, 1, .5}, 1e-15);
  expect_near(factors(settings(0, 0.5), 7), {1, 1, 1, 1, .75, .5, .25}, 1e-15);
}

TEST(LrSchedule, TotalStepsReplaceTheRunsLengthAndTheFloorFollows) {
  LrSchedulerSettings short_schedule = settings(0, {}, "linear", 0.25);
  short_schedule.total_steps = 2;
  expect_near(factors(short_schedule, 5), {1, .625, .25, .25, .25}, 1e-15);
}

TEST(LrSchedule, OneStep) { expect_near(factors(settings(0, {}), 1), {1}, 0); }

}  // namespace
}  // namespace titan::optim

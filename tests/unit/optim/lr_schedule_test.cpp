#include "titan/optim/lr_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

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
TEST(LrSchedule, RisesStaysAndDecays) {
  expect_near(factors(settings(2, 0.8), 10), {.5, 1, 1, .875, .75, .625, .5, .375, .25, .125}, 1e-15);
}

TEST(LrSchedule, WithoutARatioAllStepsAfterTheWarmupDecay) {
  expect_near(factors(settings(2, {}), 10), {.5, 1, 1, .875, .75, .625, .5, .375, .25, .125}, 1e-15);
}

TEST(LrSchedule, DecaysToAFloorInEachShape) {
  auto last_four = [](const char* type) {
    auto all = factors(settings(2, 0.5, type, 0.1), 10);
    return std::vector<double>(all.end() - 4, all.end());
  };
  expect_near(last_four("linear"), {.82, .64, .46, .28}, 1e-12);
  expect_near(last_four("sqrt"), {.59751, .43079, .30286, .19502}, 5e-6);
  expect_near(last_four("cosine"), {.91406, .68906, .41094, .18594}, 5e-6);
}

TEST(LrSchedule, CutsWarmupAndDecayToItsLength) {
  expect_near(factors(settings(200, {}), 4), {.25, .5, .75, 1}, 1e-15);
  expect_near(factors(settings(2, 1.0), 4), {.5, 1, 1, .5}, 1e-15);
}

TEST(LrSchedule, RoundsHalvesToEvenAsPythonDoes) {
  // 5 * 0.5 = 2.5 rounds to 2 decaying steps, 7 * 0.5 = 3.5 to 4.
  expect_near(factors(settings(0, 0.5), 5), {1, 1, 1, 1, .5}, 1e-15);
  expect_near(factors(settings(0, 0.5), 7), {1, 1, 1, 1, .75, .5, .25}, 1e-15);
}

TEST(LrSchedule, TotalStepsOverrideTheRunsLength) {
  LrSchedulerSettings short_schedule = settings(0, {}, "linear", 0.25);
  short_schedule.total_steps = 2;
  expect_near(factors(short_schedule, 5), {1, .625, .25, .25, .25}, 1e-15);
}

TEST(LrSchedule, HasOneStep) { expect_near(factors(settings(0, {}), 1), {1}, 0); }

// ---- a registered schedule

struct InverseSqrtArgs {
  int64_t warmup = 4;
};
void describe(config::Table<InverseSqrtArgs>& table) {
  table.field("warmup", &InverseSqrtArgs::warmup, "steps of linear warmup", config::at_least(1));
}

LrFactor inverse_sqrt(const InverseSqrtArgs& args, int64_t total_steps) {
  return [=](int64_t step) {
    if (step >= total_steps) return 0.0;
    const double done = static_cast<double>(step + 1), warmup = static_cast<double>(args.warmup);
    return std::min(done / warmup, std::sqrt(warmup / done));
  };
}

TEST(RegisteredSchedule, TakesItsArgsAndLength) {
  lr_schedules().add("inverse_sqrt", LrScheduleRule<InverseSqrtArgs>{inverse_sqrt});
  const LrSchedule plain({.name = "inverse_sqrt"}, 64);
  EXPECT_EQ(plain.factor(1), 0.5);
  EXPECT_EQ(plain.factor(15), 0.5);
  EXPECT_EQ(plain.factor(64), 0);
  LrSchedulerSettings settings{.name = "inverse_sqrt", .total_steps = 8};
  settings.args = std::make_shared<InverseSqrtArgs>(InverseSqrtArgs{1});
  const LrSchedule other(settings, 64);
  EXPECT_EQ(other.factor(3), 0.5);
  EXPECT_EQ(other.factor(8), 0);
  EXPECT_EQ(lr_schedules().get("inverse_sqrt").args.unread_keys(),
            (std::vector<std::string>{"warmup_steps", "decay_ratio", "decay_type", "min_lr_factor"}));
  EXPECT_THROW(LrSchedule({.name = "inverse_sqrd"}, 64), ConfigError);
}

}  // namespace
}  // namespace titan::optim

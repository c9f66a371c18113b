#include "guard/policies.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "titan/core/error.h"

namespace titan::train {
namespace {

FaultToleranceSettings rule(double sigma, int64_t window) {
  return {.spike_sigma = sigma, .spike_window = window, .max_rewinds = 2};
}

TEST(LossSpikes, AreOffByDefault) { EXPECT_EQ(FaultToleranceSettings{}.spike_sigma, 0); }

TEST(LossSpikes, AreAboveTheMeanByDeviations) {
  LossSpikes spikes(rule(2, 4));
  for (const double loss : {1.0, 3.0, 1.0, 3.0}) EXPECT_FALSE(spikes.add(loss)) << loss;
  EXPECT_EQ(spikes.mean(), 2);
  EXPECT_EQ(spikes.deviation(), 1);
  EXPECT_FALSE(spikes.add(4));  // exactly at the limit of 2 + 2 * 1: not a spike; the window now is 3 1 3 4
  EXPECT_NEAR(spikes.mean(), 2.75, 1e-12);
  EXPECT_TRUE(spikes.add(6));
  EXPECT_EQ(spikes.last(), 6);
  EXPECT_NEAR(spikes.mean(), 2.75, 1e-12) << "the next loss isn't compared with a spike";
  EXPECT_FALSE(spikes.add(-100)) << "a loss that falls is not a spike";
}

TEST(LossSpikes, NeedAWholeWindow) {
  LossSpikes spikes(rule(1, 5));
  for (const double loss : {1, 10, 100, 1000, 10000}) EXPECT_FALSE(spikes.add(loss));
  EXPECT_TRUE(spikes.add(1e6));
}

TEST(LossSpikes, ContinueAfterACheckpoint) {
  LossSpikes before(rule(3, 4));
  for (const double loss : {1.1, 1.2, 1.3, 1.4, 1.5}) before.add(loss);
  LossSpikes after(rule(3, 4));
  after.load(before.state());
  EXPECT_EQ(after.mean(), before.mean());
  EXPECT_EQ(after.deviation(), before.deviation());
  EXPECT_TRUE(after.add(2));
}

TEST(LossSpikes, LimitRewindsAcrossLoads) {
  LossSpikes spikes(rule(3, 4));
  const std::string first = spikes.state();
  for (int i = 0; i < 2; ++i) {
    spikes.check_rewinds_left("step 5");
    spikes.load(first);
    spikes.count_rewind(5);
  }
  EXPECT_EQ(spikes.num_rewinds(), 2);
  EXPECT_THROW(spikes.check_rewinds_left("step 5"), Error);
}

TEST(LossSpikes, RewindTwiceAsFarWhenTheyReturn) {
  FaultToleranceSettings settings = rule(3, 50);
  settings.spike_rewind_steps = 30;
  LossSpikes spikes(settings);
  EXPECT_EQ(spikes.rewind_distance(100), 30);
  const std::string before = spikes.state();
  spikes.count_rewind(100);
  spikes.load(before);  // the state to which the run rewinds
  EXPECT_EQ(spikes.rewind_distance(120), 60);
  EXPECT_EQ(spikes.rewind_distance(151), 30) << "another spike";
  spikes.count_rewind(120);
  EXPECT_EQ(spikes.rewind_distance(121), 120);
  LossSpikes restarted(settings);
  restarted.load(spikes.state());
  EXPECT_EQ(restarted.rewind_distance(121), 120);
  EXPECT_EQ(restarted.num_rewinds(), 2);
}

TEST(LossSpikes, RefuseAnInvalidState) {
  LossSpikes spikes(rule(3, 4));
  for (const char* text :
       {"{\"window\": \"no\", \"num_rewinds\": 0}", "{\"window\": [null], \"num_rewinds\": 0}",
        "{\"num_rewinds\": 0}", "{\"window\": [], \"num_rewinds\": -1}", "[]", "no"})
    EXPECT_THROW(spikes.load(text), Error) << text;
}

}  // namespace
}  // namespace titan::train

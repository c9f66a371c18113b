#include <ctime>

#include <gtest/gtest.h>

#include "observe/stragglers.h"

namespace titan::train {
namespace {

std::vector<RankPace> own_times(const std::vector<double>& seconds) {
  std::vector<RankPace> ranks;
  for (double s : seconds) ranks.push_back({.own_s = s});
  return ranks;
}

TEST(FindStraggler, FindsNoneAmongEqualRanks) {
  EXPECT_FALSE(find_straggler(own_times({1}), {}));
  EXPECT_FALSE(find_straggler(own_times({1, 1}), {}));
  EXPECT_FALSE(find_straggler(own_times({1, 1.01, 0.99, 1.02, 1}), {}));
  EXPECT_FALSE(find_straggler(own_times({0, 0, 0}), {}));
}

// No value of three is ever three standard deviations off, if the deviation includes it.
TEST(FindStraggler, FindsOneOfFewRanks) {
  for (const auto& times : {std::vector<double>{1, 3}, {1, 1.1, 3}, {1, 1, 1, 3}}) {
    const auto found = find_straggler(own_times(times), {});
    ASSERT_TRUE(found) << times.size();
    EXPECT_EQ(found->rank, static_cast<int>(times.size()) - 1);
    EXPECT_NEAR(found->median_s, 1, 0.06);
    EXPECT_GT(found->deviation, 3);
  }
}

// A comparison of each pair would take a minute.
TEST(FindStraggler, FindsOneOfManyRanksSoon) {
  std::vector<double> times;
  for (int rank = 0; rank < 65536; ++rank) times.push_back(1 + 0.001 * (rank % 50));
  times[40000] = 2;
  const std::clock_t start = std::clock();
  const auto found = find_straggler(own_times(times), {});
  EXPECT_LT(std::clock() - start, 5 * CLOCKS_PER_SEC);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->rank, 40000);
}

TEST(FindStraggler, IgnoresARankThatCostsTheStepLittle) {
  std::vector<RankPace> ranks = own_times({0.001, 0.001, 0.004});
  for (RankPace& rank : ranks) rank.step_s = 1;
  EXPECT_FALSE(find_straggler(ranks, {}));
  EXPECT_TRUE(find_straggler(ranks, {}, 0.002));
  ranks[2].own_s = 0.05;
  EXPECT_TRUE(find_straggler(ranks, {}));
  EXPECT_FALSE(find_straggler(ranks, {}, 0.1));
}

TEST(FindStraggler, FindsTheSlowerOfTwo) {
  const auto found = find_straggler(own_times({2, 1}), {});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->rank, 0);
  EXPECT_FALSE(find_straggler(own_times({1.5, 1}), {})) << "ordinary noise on a busy host";
}

TEST(FindStraggler, NeedsALargerDifferenceWhenRanksVary) {
  // Median 1.0, median absolute deviation 0.2: sigma 0.297.
  const std::vector<double> spread = {0.6, 0.8, 1.0, 1.2, 1.4};
  auto with = [&](double slow) {
    auto times = spread;
    times.push_back(slow);
    return find_straggler(own_times(times), {.sigma = 3, .ratio = 1.2});
  };
  EXPECT_FALSE(with(1.85));
  ASSERT_TRUE(with(1.95));
  EXPECT_EQ(with(1.95)->rank, 5);
  EXPECT_NEAR(with(1.95)->deviation, 0.95 / 0.29652, 1e-3);
}

TEST(FindStraggler, NeedsTheRatioToo) {
  const auto times = own_times({1, 1, 1, 1.15});  // 7.5 times the least sigma
  EXPECT_FALSE(find_straggler(times, {.sigma = 3, .ratio = 1.2}));
  EXPECT_TRUE(find_straggler(times, {.sigma = 3, .ratio = 1.1}));
  EXPECT_FALSE(find_straggler(times, {.sigma = 8, .ratio = 1.1}));
}

TEST(FindStraggler, ComparesRanksWithinTheirStage) {
  std::vector<RankPace> ranks = {
      {.own_s = 1, .stage = 0}, {.own_s = 1, .stage = 0}, {.own_s = 5, .stage = 1}, {.own_s = 5, .stage = 1}};
  EXPECT_FALSE(find_straggler(ranks, {}));
  ranks[1].own_s = 2;
  ASSERT_TRUE(find_straggler(ranks, {}));
  EXPECT_EQ(find_straggler(ranks, {})->rank, 1);
  // One rank per stage: nothing to compare with.
  EXPECT_FALSE(find_straggler({{.own_s = 1, .stage = 0}, {.own_s = 9, .stage = 1}}, {}));
}

TEST(FindStraggler, FindsTheSlowestOfSeveral) {
  const auto found = find_straggler(own_times({1, 1, 1, 1, 2, 4, 1, 1}), {});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->rank, 5);
}

TEST(WarningTimes, AllowOneWarningPerRankInTenMinutes) {
  using namespace std::chrono_literals;
  WarningTimes times;
  const WarningTimes::Time start{};
  EXPECT_TRUE(times.may_warn(3, start));
  EXPECT_TRUE(times.may_warn(1, start + 1min));
  EXPECT_FALSE(times.may_warn(3, start + 9min));
  EXPECT_TRUE(times.may_warn(3, start + 10min));
  EXPECT_FALSE(times.may_warn(3, start + 19min)) << "the last warning counts";
}

}  // namespace
}  // namespace titan::train

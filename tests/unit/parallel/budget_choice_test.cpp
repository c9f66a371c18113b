#include "parallel/activation_checkpoint/budget.h"

#include <gtest/gtest.h>

#include "titan/core/error.h"

namespace titan::activations {
namespace {

using Levels = std::vector<Level>;

LayerCosts layer(double full, double op, double none, double full_s, double op_s) {
  return {{full, full_s}, {op, op_s}, {none, 0}};
}

double bytes_of(const std::vector<LayerCosts>& layers, const Levels& levels) {
  double sum = 0;
  for (size_t i = 0; i < layers.size(); ++i) sum += layers[i].at(levels[i]).bytes;
  return sum;
}

TEST(BudgetChoice, KeepsAllOrOnlyInputsAtBothEnds) {
  const std::vector<LayerCosts> layers(4, layer(1e6, 3e6, 10e6, 3, 1));
  EXPECT_EQ(choose_levels(layers, 4e6), Levels(4, Level::Full));
  EXPECT_EQ(choose_levels(layers, 40e6), Levels(4, Level::None));
  EXPECT_THROW(choose_levels(layers, 3.9e6), Error);
}

TEST(BudgetChoice, PrefersTheMostTimeSavedPerByte) {
  // Op: 1 s for 1 MB. None: 1 s more for 7 MB more.
  const std::vector<LayerCosts> layers(4, layer(1e6, 2e6, 9e6, 2, 1));
  EXPECT_EQ(choose_levels(layers, 8.1e6), Levels(4, Level::Op));
  EXPECT_EQ(choose_levels(layers, 15.2e6), (Levels{Level::Op, Level::Op, Level::Op, Level::None}));
}

TEST(BudgetChoice, SkipsOpWhereItSavesNothing) {
  const std::vector<LayerCosts> layers(2, layer(1e6, 5e6, 9e6, 2, 2));
  EXPECT_EQ(choose_levels(layers, 10.1e6), (Levels{Level::Full, Level::None}));
}

TEST(BudgetChoice, KeepsInTheLastOfEqualLayers) {
  std::vector<LayerCosts> layers(6, layer(1e6, 3e6, 10e6, 3, 1));
  layers[0].full.recompute_s = 3.2;  // noise
  equalize_times(layers);
  EXPECT_EQ(layers[0].full.recompute_s, 3);
  const Levels levels = choose_levels(layers, 30e6);
  EXPECT_TRUE(std::is_sorted(levels.begin(), levels.end()));
  EXPECT_LE(bytes_of(layers, levels), 30e6);
}

TEST(BudgetChoice, UsesTheLeastTimeAmongEqualLayers) {
  std::vector<LayerCosts> layers{layer(1, 2, 3, 5.0, 1.0), layer(1, 2, 3, 4.0, 2.5),
                                 layer(1, 2, 4, 9.0, 9.5)};
  equalize_times(layers);
  EXPECT_EQ(layers[0].full.recompute_s, 4.0);
  EXPECT_EQ(layers[0].op.recompute_s, 2.5);  // 4.0 minus the least saving, 1.5
  EXPECT_EQ(layers[1].op.recompute_s, 2.5);
  EXPECT_EQ(layers[2].op.recompute_s, 9.5);  // has other sizes
}

TEST(BudgetChoice, HandlesUnequalLayers) {
  // The second layer is cheap to keep and expensive to recompute.
  const std::vector<LayerCosts> layers{layer(1e6, 5e6, 20e6, 2, 1), layer(1e6, 2e6, 3e6, 9, 8),
                                       layer(1e6, 5e6, 20e6, 2, 1)};
  EXPECT_EQ(choose_levels(layers, 6e6), (Levels{Level::Full, Level::None, Level::Full}));
}

// Compares with every combination, for sizes that aren't multiples of a common unit.
TEST(BudgetChoice, FindsTheOptimum) {
  const std::vector<LayerCosts> layers{
      layer(1.01e6, 2.3e6, 7.7e6, 3.1, 1.3), layer(0.97e6, 2.9e6, 9.1e6, 2.2, 0.7),
      layer(1.13e6, 1.7e6, 4.3e6, 1.9, 1.1), layer(0.89e6, 3.1e6, 5.9e6, 4.1, 2.3)};
  const auto time_of = [&](const Levels& levels) {
    double sum = 0;
    for (size_t i = 0; i < layers.size(); ++i) sum += layers[i].at(levels[i]).recompute_s;
    return sum;
  };
  for (const double budget : {4.1e6, 7e6, 10.01e6, 13.3e6, 17e6, 21e6, 26e6}) {
    double best = 1e9;
    for (int code = 0; code < 81; ++code) {
      Levels levels;
      for (int i = 0, rest = code; i < 4; ++i, rest /= 3) levels.push_back(static_cast<Level>(rest % 3));
      if (bytes_of(layers, levels) <= budget) best = std::min(best, time_of(levels));
    }
    const Levels chosen = choose_levels(layers, budget);
    EXPECT_LE(bytes_of(layers, chosen), budget);
    EXPECT_DOUBLE_EQ(time_of(chosen), best) << budget;
  }
}

TEST(BudgetChoice, DescribesTheChoice) {
  const std::vector<LayerCosts> layers(3, layer(1 << 20, 2 << 20, 9 << 20, 0.002, 0.001));
  const std::string table = describe_choice(layers, {Level::Op, Level::Op, Level::None}, 14 << 20);
  EXPECT_NE(table.find("within 14.0 MiB"), std::string::npos) << table;
  EXPECT_NE(table.find("0-1         op                       2.0                     1.0"), std::string::npos)
      << table;
  EXPECT_NE(table.find("2           everything               9.0                     0.0"), std::string::npos)
      << table;
  EXPECT_NE(table.find("together 13.0 of 27.0 MiB kept, 2.0 of 6.0 ms recomputed"), std::string::npos)
      << table;
}

TEST(BudgetChoice, InterpolatesBetweenLeastAndMost) {
  const std::vector<LayerCosts> layers(2, layer(1e6, 3e6, 10e6, 3, 1));
  EXPECT_DOUBLE_EQ(budget_bytes_of(layers, -1, 0), 2e6);
  EXPECT_DOUBLE_EQ(budget_bytes_of(layers, -1, 0.5), 11e6);
  EXPECT_DOUBLE_EQ(budget_bytes_of(layers, -1, 1), 20e6);
  EXPECT_DOUBLE_EQ(budget_bytes_of(layers, 5000000, 1), 5e6);
}

}  // namespace
}  // namespace titan::activations

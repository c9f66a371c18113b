#include "titan/parallel/pipeline_balance.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <random>

#include <gtest/gtest.h>

#include "titan/core/error.h"
#include "titan/parallel/pipeline_generators.h"

namespace titan::pipeline {
namespace {

using Counts = std::vector<int>;

std::vector<ModuleCost> seconds(const std::vector<double>& times) {
  std::vector<ModuleCost> costs;
  for (const double time : times) costs.push_back({.forward_s = time / 4, .backward_s = time * 3 / 4});
  return costs;
}

double longest_stage(const std::vector<ModuleCost>& costs, const Counts& counts) {
  double longest = 0;
  auto next = costs.begin();
  for (const int count : counts) {
    double time = 0;
    for (int i = 0; i < count; ++i) time += (next++)->time_s();
    longest = std::max(longest, time);
  }
  return longest;
}

std::vector<double> bytes_of_ranks(const std::vector<ModuleCost>& costs, const Counts& counts,
                                   const BalanceOptions& options) {
  std::vector<double> bytes(options.rank_of_stage.size());
  auto next = costs.begin();
  for (size_t stage = 0; stage < counts.size(); ++stage) {
    const auto& live = options.live_micro_batches;
    for (int i = 0; i < counts[stage]; ++i, ++next)
      bytes[static_cast<size_t>(options.rank_of_stage[stage])] +=
          next->fixed_bytes + live[live.size() == 1 ? 0 : stage] * next->activation_bytes;
  }
  return bytes;
}

bool fits(const std::vector<ModuleCost>& costs, const Counts& counts, const BalanceOptions& options) {
  const auto bytes = bytes_of_ranks(costs, counts, options);
  return *std::max_element(bytes.begin(), bytes.end()) <= options.memory_bytes;
}

// Tries every split.
void try_all(int modules, size_t stages, Counts& counts, const std::function<void(const Counts&)>& visit) {
  if (counts.size() + 1 == stages) {
    counts.push_back(modules);
    visit(counts);
    counts.pop_back();
    return;
  }
  for (int count = 1; count <= modules - static_cast<int>(stages - counts.size() - 1); ++count) {
    counts.push_back(count);
    try_all(modules - count, stages, counts, visit);
    counts.pop_back();
  }
}

std::optional<double> brute_force(const std::vector<ModuleCost>& costs, const BalanceOptions& options) {
  std::optional<double> best;
  Counts counts;
  try_all(static_cast<int>(costs.size()), options.rank_of_stage.size(), counts, [&](const Counts& split) {
    if (!fits(costs, split, options)) return;
    const double time = longest_stage(costs, split);
    if (!best || time < *best) best = time;
  });
  return best;
}

TEST(PipelineBalance, GivesAHeavyHeadAStageOfItsOwn) {
  EXPECT_EQ(balanced_counts(seconds({0, 1, 1, 1, 1, 0, 3}), {.rank_of_stage = {0, 1}}), (Counts{6, 1}));
  EXPECT_EQ(balanced_counts(seconds({0, 1, 1, 1, 1, 0, 3}), {.rank_of_stage = {0, 1, 2}}), (Counts{3, 3, 1}));
}

// Two stages of 4 are as slow as one; the others share what is left evenly.
TEST(PipelineBalance, SharesEvenlyWhatTheSlowestLeaves) {
  EXPECT_EQ(balanced_counts(seconds({4, 1, 1, 1, 1, 1, 1}), {.rank_of_stage = {0, 1, 2}}), (Counts{1, 3, 3}));
}

TEST(PipelineBalance, OneStageTakesEverything) {
  EXPECT_EQ(balanced_counts(seconds({1, 2, 3}), {.rank_of_stage = {0}}), Counts{3});
}

// The same memory twice on a rank doesn't fit; with other partners it does.
TEST(PipelineBalance, StagesOfOneRankShareItsMemory) {
  std::vector<ModuleCost> costs = seconds({1, 1, 1, 1, 1, 1});
  for (const size_t heavy : {0, 5}) costs[heavy].fixed_bytes = 10;
  const BalanceOptions loop{.rank_of_stage = loop_stage_map(2, 4), .memory_bytes = 15};
  EXPECT_EQ(longest_stage(costs, balanced_counts(costs, loop)), 2);
  const BalanceOptions bent{.rank_of_stage = v_stage_map(2, 4), .memory_bytes = 15};
  EXPECT_THROW(balanced_counts(costs, bent), ConfigError);
}

// The first stage of 1F1B holds the most micro-batches, so it gets fewer layers where memory is short.
TEST(PipelineBalance, StagesWithMoreMicroBatchesGetLessWhereMemoryIsShort) {
  std::vector<ModuleCost> costs = seconds({1, 1, 1, 1, 1, 1, 1, 1});
  for (ModuleCost& cost : costs) cost.activation_bytes = 1;
  BalanceOptions options{.rank_of_stage = loop_stage_map(4, 4),
                         .live_micro_batches = live_micro_batches(make_schedule("1F1B", 4, 4, 8))};
  EXPECT_EQ(options.live_micro_batches, (std::vector<double>{4, 3, 2, 1}));
  EXPECT_EQ(balanced_counts(costs, options), (Counts{2, 2, 2, 2}));
  options.memory_bytes = 6;
  EXPECT_EQ(balanced_counts(costs, options), (Counts{1, 2, 3, 2}));
}

TEST(PipelineBalance, IsTheBestThereIs) {
  std::mt19937 random(3);
  const auto draw = [&](int most) { return static_cast<double>(random() % static_cast<unsigned>(most + 1)); };
  int binding = 0, impossible = 0;
  for (int trial = 0; trial < 400; ++trial) {
    const int ranks = 1 + trial % 3, chunks = 1 + trial / 3 % 3, stages = ranks * chunks;
    const int modules = stages + trial / 9 % 4;
    std::vector<ModuleCost> costs;
    for (int i = 0; i < modules; ++i) costs.push_back({draw(3), draw(5), draw(8), draw(3)});
    BalanceOptions options{.rank_of_stage =
                               trial % 2 == 0 ? loop_stage_map(ranks, stages) : v_stage_map(ranks, stages)};
    options.live_micro_batches.clear();
    for (int i = 0; i < stages; ++i) options.live_micro_batches.push_back(1 + draw(2));
    const auto unlimited = brute_force(costs, options);
    EXPECT_EQ(longest_stage(costs, balanced_counts(costs, options)), *unlimited);

    double all = 0;
    for (const double bytes : bytes_of_ranks(costs, balanced_counts(costs, options), options)) all += bytes;
    options.memory_bytes = all / ranks * (0.9 + 0.1 * draw(3));
    const auto best = brute_force(costs, options);
    if (!best) {
      ++impossible;
      EXPECT_THROW(balanced_counts(costs, options), ConfigError);
      continue;
    }
    const Counts counts = balanced_counts(costs, options);
    EXPECT_TRUE(fits(costs, counts, options));
    EXPECT_EQ(longest_stage(costs, counts), *best) << "trial " << trial;
    if (*best > *unlimited) ++binding;
  }
  EXPECT_GT(binding, 20);
  EXPECT_GT(impossible, 20);
}

// 126 layers with embedding, norm and head, on 16 ranks of two stages each, whose memory binds.
TEST(PipelineBalance, IsQuickAtRealSizes) {
  std::vector<ModuleCost> costs(129,
                                {.forward_s = 1, .backward_s = 2, .fixed_bytes = 1, .activation_bytes = 0.1});
  costs[0] = {.forward_s = 0.01, .backward_s = 0.1, .fixed_bytes = 0.65};
  costs[127] = {.forward_s = 0.01, .backward_s = 0.01};
  costs[128] = {.forward_s = 0.7, .backward_s = 1.4, .fixed_bytes = 0.65};
  for (const char* name : {"Interleaved1F1B", "ZBVZeroBubble"}) {
    const Schedule schedule = make_schedule(name, 16, 32, 64);
    BalanceOptions options{.rank_of_stage = schedule.rank_of_stage,
                           .live_micro_batches = live_micro_batches(schedule)};
    const Counts free = balanced_counts(costs, options);
    const auto bytes = bytes_of_ranks(costs, free, options);
    options.memory_bytes = 0.98 * *std::max_element(bytes.begin(), bytes.end());
    const Counts counts = balanced_counts(costs, options);
    EXPECT_TRUE(fits(costs, counts, options)) << name;
    EXPECT_GE(longest_stage(costs, counts), longest_stage(costs, free)) << name;
  }
}

TEST(PipelineBalance, RefusesMoreStagesThanModules) {
  EXPECT_THROW(balanced_counts(seconds({1, 1}), {.rank_of_stage = {0, 1, 2}}), ConfigError);
}

TEST(PipelineBalance, CutsTheSequence) {
  const ModuleSequence sequence{{"embedding"}, {"layers.0", "layers.1"}, {"head"}};
  EXPECT_EQ(split_balanced(sequence, seconds({0, 1, 1, 2}), {.rank_of_stage = {0, 1}}),
            (StageModules{{"embedding", "layers.0", "layers.1"}, {"head"}}));
  EXPECT_THROW(split_balanced(sequence, seconds({1}), {.rank_of_stage = {0}}), Error);
}

}  // namespace
}  // namespace titan::pipeline

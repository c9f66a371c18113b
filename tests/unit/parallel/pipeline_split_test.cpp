#include <gtest/gtest.h>
#include <algorithm>
#include <functional>
#include <optional>
#include <random>

#include "parallel/pipeline/split.h"
#include "titan/core/error.h"
#include "titan/parallel/pipeline_schedule.h"

namespace titan::pipeline {
namespace {

using Names = std::vector<std::string>;

ModuleSequence llama(int num_layers) {
  ModuleSequence sequence{{"tok_embeddings"}, {}, {"norm", "output"}};
  for (int i = 0; i < num_layers; ++i) sequence.layers.push_back(str("layers.", i));
  return sequence;
}

Names short_lists(const StageModules& stages) {
  Names lists;
  for (const Names& modules : stages) lists.push_back(short_list(modules));
  return lists;
}

std::vector<int> layers_in(const StageModules& stages) {
  std::vector<int> counts;
  for (const Names& modules : stages)
    counts.push_back(
        static_cast<int>(std::count_if(modules.begin(), modules.end(),
                                       [](const std::string& name) { return name.starts_with("layers."); })));
  return counts;
}

template <class Call>
Names problems_of(const Call& call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return error.problems();
  }
  return {};
}

TEST(PipelineSplit, EqualsTorchTitan) {
  EXPECT_EQ(short_lists(split_evenly(llama(32), 4)), (Names{"tok_embeddings, layers.0..7", "layers.8..16",
                                                            "layers.17..24", "layers.25..31, norm, output"}));
  EXPECT_EQ(layers_in(split_evenly(llama(32), 8)), (std::vector{4, 5, 4, 4, 4, 4, 4, 3}));
  EXPECT_EQ(short_lists(split_evenly(llama(6), 2)),
            (Names{"tok_embeddings, layers.0..2", "layers.3..5, norm, output"}));
  EXPECT_EQ(layers_in(split_evenly(llama(80), 8)), (std::vector{10, 11, 10, 10, 10, 10, 10, 9}));
  EXPECT_EQ(layers_in(split_evenly(llama(126), 16)),
            (std::vector{7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7}));
}

TEST(PipelineSplit, StagesWithoutLayersAreLegal) {
  EXPECT_EQ(short_lists(split_evenly(llama(6), 8)),
            (Names{"tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3", "layers.4", "layers.5",
                   "norm, output"}));
}

TEST(PipelineSplit, OneStageTakesEverything) {
  EXPECT_EQ(split_evenly(llama(3), 1), StageModules{llama(3).names()});
  EXPECT_EQ(split_evenly(llama(3), 1, {9, 9}), StageModules{llama(3).names()});
}

TEST(PipelineSplit, EndsCountAsConfigured) {
  EXPECT_EQ(layers_in(split_evenly(llama(8), 4, {0, 0})), (std::vector{2, 2, 2, 2}));
  EXPECT_EQ(layers_in(split_evenly(llama(8), 4, {0, 2})), (std::vector{3, 3, 2, 0}));
  EXPECT_EQ(layers_in(split_evenly(llama(8), 4, {3, 1})), (std::vector{0, 3, 3, 2}));
}

// A split is always the sequence in order.
TEST(PipelineSplit, TakesEveryModuleOnce) {
  for (int layers = 1; layers <= 20; ++layers)
    for (int stages = 1; stages <= layers + 2; ++stages) {
      Names all;
      for (const Names& modules : split_evenly(llama(layers), stages))
        all.insert(all.end(), modules.begin(), modules.end());
      EXPECT_EQ(all, llama(layers).names()) << layers << " layers, " << stages << " stages";
    }
}

TEST(PipelineSplit, RefusesImpossibleSplits) {
  EXPECT_EQ(problems_of([] { split_evenly(llama(6), 0); }), Names{"a model can't be cut into 0 stages"});
  EXPECT_EQ(problems_of([] { split_evenly(llama(6), 9); }),
            Names{"9 stages are more than the 6 layers and the embedding and head, which count for 1 and 1"});
  EXPECT_EQ(
      problems_of([] {
        split_evenly(llama(6), 4, {3, 1});
      }),
      Names{"the first stage's ends count for 3 layers (pipeline_parallel_first_stage_less_layers), but a "
            "stage has 2"});
  EXPECT_EQ(
      problems_of([] {
        split_evenly(llama(6), 4, {0, 3});
      }),
      Names{"the last stage's ends count for 3 layers (pipeline_parallel_last_stage_less_layers), but a "
            "stage has 2"});
  // There is no module before the layers, and the weight is the first stage's whole share.
  const ModuleSequence headless{{}, {"layers.0", "layers.1"}, {}};
  EXPECT_EQ(problems_of([&] {
              split_evenly(headless, 3, {1, 0});
            }),
            Names{"stage 0 of 3 is left without modules"});
}

TEST(PipelineSplit, CountsStagesByTheirLayers) {
  EXPECT_EQ(count_stages(32, {}, 9), 4);
  EXPECT_EQ(count_stages(32, {}, 17), 2);
  EXPECT_EQ(count_stages(126, {}, 8), 16);
  EXPECT_EQ(count_stages(126, {0, 0}, 1), 126);
}

TEST(PipelineSplit, TakesListsAsGiven) {
  const StageModules lists = {{"tok_embeddings"}, {"layers.0", "layers.1", "norm"}, {"output"}};
  EXPECT_EQ(split_by_lists(llama(2), lists), lists);
}

TEST(PipelineSplit, ReportsAllProblemsOfLists) {
  const auto problems = [](const StageModules& lists) {
    return problems_of([&] { split_by_lists(llama(3), lists); });
  };
  EXPECT_EQ(problems({}),
            (Names{"the split has no stages", "no stage has tok_embeddings, layers.0..2, norm, output"}));
  EXPECT_EQ(
      problems({{"tok_embeddings", "layers.0", "layers.1"}, {}, {"layers.1", "layer.2", "norm", "output"}}),
      (Names{"stage 1 has no modules", "stages 0 and 2 both have 'layers.1'",
             "stage 2: the model calls no module 'layer.2' in its sequence; did you mean 'layers.2'?",
             "no stage has layers.2"}));
  EXPECT_EQ(problems({{"tok_embeddings", "layers.1"}, {"layers.0", "layers.2", "norm", "output"}}),
            Names{"stage 1: 'layers.0' is listed after 'layers.1', but the model calls it earlier"});
}

TEST(PipelineSplit, ShortensLists) {
  EXPECT_EQ(short_list({}), "");
  EXPECT_EQ(short_list({"a.0", "a.1", "a.3", "b.4", "c"}), "a.0..1, a.3, b.4, c");
  EXPECT_EQ(short_list({"layers.9", "layers.10", "layers.11"}), "layers.9..11");
}

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

TEST(PipelineBalance, GivesAHeavyHeadItsOwnStage) {
  EXPECT_EQ(balanced_counts(seconds({0, 1, 1, 1, 1, 0, 3}), {.rank_of_stage = {0, 1}}), (Counts{6, 1}));
  EXPECT_EQ(balanced_counts(seconds({0, 1, 1, 1, 1, 0, 3}), {.rank_of_stage = {0, 1, 2}}), (Counts{3, 3, 1}));
}

// The first module alone takes 4, so a second stage of 4 wouldn't be slower, but the rest is shared evenly.
TEST(PipelineBalance, SharesTheRestEvenly) {
  EXPECT_EQ(balanced_counts(seconds({4, 1, 1, 1, 1, 1, 1}), {.rank_of_stage = {0, 1, 2}}), (Counts{1, 3, 3}));
}

TEST(PipelineBalance, OneStageTakesEverything) {
  EXPECT_EQ(balanced_counts(seconds({1, 2, 3}), {.rank_of_stage = {0}}), Counts{3});
}

// Two large stages don't fit on one rank; paired with smaller ones they do.
TEST(PipelineBalance, StagesOfOneRankShareItsMemory) {
  std::vector<ModuleCost> costs = seconds({1, 1, 1, 1, 1, 1});
  for (const size_t heavy : {0, 5}) costs[heavy].fixed_bytes = 10;
  const BalanceOptions loop{.rank_of_stage = loop_stage_map(2, 4), .memory_bytes = 15};
  EXPECT_EQ(longest_stage(costs, balanced_counts(costs, loop)), 2);
  const BalanceOptions bent{.rank_of_stage = v_stage_map(2, 4), .memory_bytes = 15};
  EXPECT_THROW(balanced_counts(costs, bent), ConfigError);
}

// The first stage of 1F1B has the most live micro-batches, so it gets fewer layers if memory is short.
TEST(PipelineBalance, StagesWithMoreMicroBatchesGetFewerLayersWhereMemoryIsShort) {
  std::vector<ModuleCost> costs = seconds({1, 1, 1, 1, 1, 1, 1, 1});
  for (ModuleCost& cost : costs) cost.activation_bytes = 1;
  BalanceOptions options{.rank_of_stage = loop_stage_map(4, 4),
                         .live_micro_batches = live_micro_batches(make_schedule("1F1B", 4, 4, 8))};
  EXPECT_EQ(options.live_micro_batches, (std::vector<double>{4, 3, 2, 1}));
  EXPECT_EQ(balanced_counts(costs, options), (Counts{2, 2, 2, 2}));
  options.memory_bytes = 6;
  EXPECT_EQ(balanced_counts(costs, options), (Counts{1, 2, 3, 2}));
}

TEST(PipelineBalance, FindsTheOptimum) {
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

// 126 layers with embedding, norm and head, on 16 ranks with two stages each and a binding memory limit.
TEST(PipelineBalance, IsFastAtRealSizes) {
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

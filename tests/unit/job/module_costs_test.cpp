
#include <algorithm>
#include <limits>

#include <gtest/gtest.h>

#include "job/pipeline_stages.h"
#include "parallel/pipeline/split.h"
#include "titan/core/error.h"
#include "unit/job/load_preset.h"

namespace titan::train {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// The debug model's layers and vocabulary; a micro-batch is one sequence.
constexpr double kTokens = 256, kDim = 256, kVocab = 2048;
constexpr double kLayerElements = 4 * kDim * kDim + 3 * kDim * 768;

JobConfig debug_model(Words words) {
  words.insert(words.begin(), {"--training.seq_len", "256", "--activation_checkpoint.mode", "none"});
  return load_preset("llama3_debug", 1, words);
}

// The sequence: tok_embeddings, layers.0..5, norm, output.
TEST(ModuleCosts, CountOperations) {
  const auto costs = computed_costs(debug_model({}), {}, {.flops = 1, .bytes = kInfinity});
  ASSERT_EQ(costs.size(), 9u);
  const double layer = kTokens * (2 * kLayerElements + 2 * kTokens * kDim);
  for (size_t i = 1; i <= 6; ++i) {
    EXPECT_DOUBLE_EQ(costs[i].forward_s, layer);
    EXPECT_DOUBLE_EQ(costs[i].backward_s, 2 * layer);
  }
  EXPECT_DOUBLE_EQ(costs[8].forward_s, kTokens * 2 * kDim * kVocab);
  for (const size_t i : {0, 7}) EXPECT_EQ(costs[i].time_s(), 0);
}

// A lookup reads rows; its gradient is a whole matrix.
TEST(ModuleCosts, CountBytes) {
  const auto costs = computed_costs(debug_model({}), {}, {.flops = kInfinity, .bytes = 1});
  EXPECT_GE(costs[0].forward_s, kTokens * kDim * 2);
  EXPECT_LT(costs[0].forward_s, 2 * kTokens * kDim * 2);
  EXPECT_DOUBLE_EQ(costs[0].backward_s, 2 * costs[0].forward_s + kVocab * kDim * 2);
  EXPECT_GT(costs[8].forward_s, kVocab * kDim * 2);
  EXPECT_GT(costs[1].forward_s, kLayerElements * 2);
}

TEST(ModuleCosts, CountTheMemoryOfARank) {
  const JobConfig config = debug_model({});
  const double elements = kLayerElements + 2 * kDim;
  EXPECT_DOUBLE_EQ(computed_costs(config)[1].fixed_bytes, elements * (4 * 4 + 2));
  const ParallelDims dims{.dp_shard = 4, .rows = {{"cp", 2}}, .tp = 2};
  EXPECT_DOUBLE_EQ(computed_costs(config, dims)[1].fixed_bytes, elements / 2 * (4 * 4 / 8.0 + 2));
  EXPECT_DOUBLE_EQ(computed_costs(config, dims)[1].activation_bytes,
                   computed_costs(config)[1].activation_bytes / 4);
}

TEST(ModuleCosts, IncludeRecomputation) {
  const auto kept = computed_costs(debug_model({}));
  const auto full = computed_costs(debug_model({"--activation_checkpoint.mode", "full"}));
  const auto some = computed_costs(debug_model({"--activation_checkpoint.mode", "selective"}));
  EXPECT_DOUBLE_EQ(full[1].backward_s, kept[1].backward_s + kept[1].forward_s);
  EXPECT_DOUBLE_EQ(full[1].activation_bytes, kTokens * kDim * 2);
  EXPECT_GT(kept[1].activation_bytes, 10 * kTokens * kDim * 2);
  EXPECT_DOUBLE_EQ(some[1].backward_s, kept[1].backward_s);  // every second layer
  EXPECT_DOUBLE_EQ(some[2].backward_s, full[2].backward_s);
  for (const size_t i : {0, 7, 8}) EXPECT_DOUBLE_EQ(full[i].backward_s, kept[i].backward_s);
}

// A large vocabulary makes the head as slow as several layers, so the last stage gets fewer layers.
TEST(ModuleCosts, BalanceAPipeline) {
  const Words words = {"--parallelism.pipeline_parallel_degree",
                       "2",
                       "--parallelism.pipeline_parallel_split",
                       "balanced",
                       "--model.args.vocab_size",
                       "16384",
                       "--training.seq_len",
                       "256"};
  const JobConfig config = load_preset("llama3_debug", 2, words);
  const auto plan = plan_stages(config);
  const auto costs = computed_costs(config);
  const auto slower_stage = [&](size_t cut) {
    double times[2] = {0, 0};
    for (size_t i = 0; i < costs.size(); ++i) times[i < cut ? 0 : 1] += costs[i].time_s();
    return std::max(times[0], times[1]);
  };
  double best = kInfinity;
  for (size_t cut = 1; cut < costs.size(); ++cut) best = std::min(best, slower_stage(cut));
  EXPECT_DOUBLE_EQ(slower_stage(plan.modules[0].size()), best);
  EXPECT_GT(plan.modules[0].size(), 4u);  // the embedding and more than half of the layers
}

Words problems_of(const Words& words) {
  try {
    load_preset("llama3_debug", 2, words);
  } catch (const ConfigError& error) {
    return error.problems();
  }
  return {};
}

// In 1F1B the first stage holds one more micro-batch than the last. With little memory it gets fewer layers.
TEST(ModuleCosts, BalanceAPipelineWithinAMemoryLimit) {
  Words words = {"--parallelism.pipeline_parallel_degree",
                 "2",
                 "--parallelism.pipeline_parallel_split",
                 "balanced",
                 "--parallelism.data_parallel_shard_degree",
                 "1",
                 "--training.seq_len",
                 "2048"};
  const auto first_stage = [&] { return plan_stages(load_preset("llama3_debug", 2, words)).modules[0]; };
  const size_t unlimited = first_stage().size();
  const auto costs = computed_costs(load_preset("llama3_debug", 2, words));
  double bytes = 0;  // in the first stage, which holds two micro-batches
  for (size_t i = 0; i < unlimited; ++i) bytes += costs[i].fixed_bytes + 2 * costs[i].activation_bytes;
  words.insert(words.end(), {"--parallelism.pipeline_parallel_split_memory_gib",
                             std::to_string(0.99 * bytes / (1 << 30))});
  EXPECT_LT(first_stage().size(), unlimited);

  words.back() = "0.001";
  ASSERT_EQ(problems_of(words).size(), 1u);
  EXPECT_NE(problems_of(words)[0].find("keeps every rank within 0.001 GiB"), std::string::npos)
      << problems_of(words)[0];
}

TEST(ModuleCosts, RefuseAMemoryLimitWithoutABalancedSplit) {
  const Words limit = {"--parallelism.pipeline_parallel_degree", "2",
                       "--parallelism.pipeline_parallel_split_memory_gib", "1"};
  ASSERT_EQ(problems_of(limit).size(), 1u);
  EXPECT_NE(problems_of(limit)[0].find("is read only with pipeline_parallel_split"), std::string::npos);
  Words balanced = limit;
  balanced.insert(balanced.end(), {"--parallelism.pipeline_parallel_split", "balanced"});
  ASSERT_EQ(problems_of(balanced).size(), 1u);
  EXPECT_NE(problems_of(balanced)[0].find("needs data_parallel_shard_degree"), std::string::npos);
}

}  // namespace
}  // namespace titan::train

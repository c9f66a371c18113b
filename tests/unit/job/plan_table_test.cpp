// `titan train --print-plan`: the table's text for the debug model, and its bytes by formula.

#include <map>
#include <sstream>

#include <gtest/gtest.h>

#include "job/dry_run.h"
#include "titan/core/error.h"
#include "unit/job/load_preset.h"

namespace titan::train {
namespace {

std::string table_of(int world_size, const Words& words) {
  return plan_table(load_preset("llama3_debug", world_size, words), world_size);
}

// The last word of each line, by its first word.
std::map<std::string, int64_t> bytes_in(const std::string& table) {
  std::map<std::string, int64_t> bytes;
  std::istringstream lines(table);
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(' '), last = line.rfind(' ');
    if (first == std::string::npos || line.find_first_not_of("0123456789", last + 1) != std::string::npos)
      continue;
    bytes[line.substr(0, first)] = std::stoll(line.substr(last + 1));
  }
  return bytes;
}

TEST(PlanTable, ShowsTheDebugModel) {
  const std::string expected =
      R"(llama3 debugmodel on 4 rank(s): dp_shard 2, tp 2
rank 0 keeps 1541760 of 6163712 parameters; its part of a step: 1 micro-batch(es) of 4 x 256 tokens

module                       style             weights           input and output                         forward / backward                                     bytes/step
tok_embeddings               Rowwise           weight Shard(0)   out Partial -> Shard(1)                  reduce-scatter / all-gather                                524288
layers.0..5.attention        PrepareInput                        in Shard(1) -> Replicate                 all-gather / reduce-scatter                               3145728
layers.0..5.attention.wq     Colwise           weight Shard(0)   in Replicate; out Shard(-1)                                                                              0
layers.0..5.attention.wk     Colwise           weight Shard(0)   in Replicate; out Shard(-1)                                                                              0
layers.0..5.attention.wv     Colwise           weight Shard(0)   in Replicate; out Shard(-1)                                                                              0
layers.0..5.attention.wo     Rowwise           weight Shard(1)   in Shard(-1); out Partial -> Shard(1)    reduce-scatter / all-gather                               3145728
layers.0..5.feed_forward     PrepareInput                        in Shard(1) -> Replicate                 all-gather / reduce-scatter                               3145728
layers.0..5.feed_forward.w1  Colwise           weight Shard(0)   in Replicate; out Shard(-1)                                                                              0
layers.0..5.feed_forward.w2  Rowwise           weight Shard(1)   in Shard(-1); out Partial -> Shard(1)    reduce-scatter / all-gather                               3145728
layers.0..5.feed_forward.w3  Colwise           weight Shard(0)   in Replicate; out Shard(-1)                                                                              0
layers.0..5.attention_norm   SequenceParallel  weight Replicate                                           - / all-reduce of gradients                                  3072
layers.0..5.ffn_norm         SequenceParallel  weight Replicate                                           - / all-reduce of gradients                                  3072
norm                         SequenceParallel  weight Replicate                                           - / all-reduce of gradients                                   512
output                       Colwise           weight Shard(0)   in Shard(1) -> Replicate; out Shard(-1)  all-gather per chunk / -; all-gather / reduce-scatter      540672
all                                                                                                                                                                13654528
)";
  EXPECT_EQ(table_of(4, {"--parallelism.tensor_parallel_degree", "2"}), expected);
}

constexpr int64_t kModelDim = 256, kLayers = 6,
                  kBatchTokens = 4 * 256;  // the debug model and its micro-batch

// An fp32 gradient of a norm goes around twice.
constexpr int64_t kNorms = 2 * kLayers + 1, kNormBytes = 2 * 4 * kModelDim;

// Each of N ranks receives N - 1 of N parts of a bfloat16 activation, once in the forward and once in the
// backward: for a block's two inputs and two outputs, the embedding and the head.
TEST(PlanTable, CountsMoreBytesForMoreRanks) {
  for (const int64_t ranks : {2, 4, 8}) {
    const auto bytes = bytes_in(
        table_of(static_cast<int>(ranks), {"--parallelism.tensor_parallel_degree", std::to_string(ranks)}));
    const int64_t whole = kBatchTokens * kModelDim * 2, both_ways = 2 * whole / ranks * (ranks - 1);
    const int64_t statistics = 2 * kBatchTokens * 8 * (ranks - 1);
    EXPECT_EQ(bytes.at("layers.0..5.attention"), kLayers * both_ways);
    EXPECT_EQ(bytes.at("layers.0..5.feed_forward.w2"), kLayers * both_ways);
    EXPECT_EQ(bytes.at("output"), both_ways + statistics);
    EXPECT_EQ(bytes.at("layers.0..5.ffn_norm"), kLayers * kNormBytes / ranks * (ranks - 1));
    EXPECT_EQ(bytes.at("all"),
              (4 * kLayers + 2) * both_ways + statistics + kNorms * kNormBytes / ranks * (ranks - 1));
  }
}

// Sequence parallelism splits an all-reduce into its two halves. These move as many bytes, except for the
// gradients of norms.
TEST(PlanTable, CountsTheSameBytesForAllReduces) {
  const Words tp = {"--parallelism.tensor_parallel_degree", "2"};
  Words whole = tp;
  whole.push_back("--parallelism.no_enable_sequence_parallel");
  const std::string table = table_of(2, whole);
  EXPECT_NE(table.find("all-reduce / -"), std::string::npos) << table;
  EXPECT_EQ(table.find("reduce-scatter"), std::string::npos) << table;
  EXPECT_EQ(bytes_in(table).at("all") + kNorms * kNormBytes / 2, bytes_in(table_of(2, tp)).at("all"));
}

TEST(PlanTable, CountsEveryMicroBatchAndEveryRecomputation) {
  const Words tp = {"--parallelism.tensor_parallel_degree", "2"};
  Words accumulated = tp, recomputed = tp;
  accumulated.insert(accumulated.end(), {"--training.global_batch_size", "12"});
  recomputed.insert(recomputed.end(), {"--activation_checkpoint.mode", "full"});
  const int64_t once = bytes_in(table_of(2, tp)).at("all");
  EXPECT_EQ(bytes_in(table_of(2, accumulated)).at("all"), 3 * once);
  // Repeats the forward's half of a layer's bytes, without its last product, which nothing needs.
  const int64_t layer = kBatchTokens * kModelDim * 2 / 2;
  EXPECT_EQ(bytes_in(table_of(2, recomputed)).at("all"), once + kLayers * 3 * layer);
}

// With overlap, the first product gathers the block's input; without overlap, the block's preparation does.
TEST(PlanTable, CountsTheSameBytesForOverlappedProducts) {
  const Words tp = {"--parallelism.tensor_parallel_degree", "2"};
  Words words = tp;
  words.emplace_back("--parallelism.enable_async_tensor_parallel");
  const std::string table = table_of(2, words);
  const auto overlapped = bytes_in(table), plain = bytes_in(table_of(2, tp));
  const std::map<std::string, std::string> counterparts = {
      {"attention.wq", "attention"},         {"attention.wk", "attention.wk"},
      {"attention.wv", "attention.wv"},      {"attention.wo", "attention.wo"},
      {"feed_forward.w1", "feed_forward"},   {"feed_forward.w2", "feed_forward.w2"},
      {"feed_forward.w3", "feed_forward.w3"}};
  for (const auto& [mine, theirs] : counterparts)
    EXPECT_EQ(overlapped.at("layers.0..5." + mine), plain.at("layers.0..5." + theirs)) << mine;
  EXPECT_EQ(overlapped.at("output"), plain.at("output"));
  EXPECT_EQ(overlapped.at("all"), plain.at("all"));
  EXPECT_NE(table.find("all-gather / reduce-scatter in products "), std::string::npos) << table;
  EXPECT_NE(table.find("reduce-scatter / all-gather in products "), std::string::npos) << table;
}

// Four of the eight moves of a layer's activations are gathers, which take half the bytes.
TEST(PlanTable, CountsOneByteForGatheredFloat8Activations) {
  const Words tp = {"--parallelism.tensor_parallel_degree", "2"};
  Words words = tp;
  words.insert(words.end(),
               {"--model.converters", "quantize.linear.float8", "--quantize.linear.float8.emulate"});
  const std::string table = table_of(2, words);
  EXPECT_NE(table.find("  all-gather / reduce-scatter in products; all-gather of scales  "),
            std::string::npos)
      << table;
  EXPECT_NE(table.find("in products: at once, in Float8 where the products take it"), std::string::npos)
      << table;
  const auto high = static_cast<double>(bytes_in(table_of(2, tp)).at("all"));
  EXPECT_LT(static_cast<double>(bytes_in(table).at("all")), 0.85 * high);
}

TEST(PlanTable, ShowsTheTransportOfOverlappedParts) {
  const auto table_with = [](const std::string& transport) {
    return table_of(
        2, {"--parallelism.tensor_parallel_degree", "2", "--parallelism.enable_async_tensor_parallel",
            "--parallelism.async_tensor_parallel_transport", transport});
  };
  const char* sent = "\nin products: sent and received\n";
  const char* shared = "\nin products: through symmetric memory\n";
  EXPECT_NE(table_with("send_receive").find(sent), std::string::npos);
  EXPECT_NE(table_with("symmetric_memory").find(shared), std::string::npos);
  EXPECT_NE(table_with("auto").find("sent and received, or through symmetric memory"), std::string::npos);
}

TEST(PlanTable, SaysThatThereIsNoTensorParallelism) {
  EXPECT_NE(table_of(2, {}).find("no tensor parallelism (parallelism.tensor_parallel_degree = 1)"),
            std::string::npos);
}

TEST(PlanTable, ListsTheStagesOfAPipeline) {
  const std::string expected =
      R"(llama3 debugmodel on 4 rank(s): pp 2, dp_shard 2
rank 0 keeps 1376896 of 6163712 parameters; its part of a step: 4 micro-batch(es) of 1 x 256 tokens

stage  pp rank  modules                   parameters
0      0        tok_embeddings, layers.0     1376768
1      1        layers.1..2                  1704960
2      1        layers.3..4                  1704960
3      0        layers.5, norm, output       1377024
the first rank with the loss is 0

no tensor parallelism (parallelism.tensor_parallel_degree = 1): every module is whole
)";
  EXPECT_EQ(table_of(4, {"--parallelism.pipeline_parallel_degree", "2",
                         "--parallelism.pipeline_parallel_schedule", "ZBVZeroBubble"}),
            expected);
}

TEST(PlanTable, ListsParametersThatStagesShare) {
  const std::string table =
      table_of(2, {"--parallelism.pipeline_parallel_degree", "2", "--model.args.tie_embeddings"});
  EXPECT_NE(table.find("tok_embeddings.weight is on the stages 0, 1\n"), std::string::npos) << table;
  EXPECT_NE(table.find("the first rank with the loss is 1\n"), std::string::npos) << table;
}

// The table has the modules of the rank's own stages only.
TEST(PlanTable, ShowsTensorParallelismOfOwnStages) {
  const std::string table = table_of(
      4, {"--parallelism.pipeline_parallel_degree", "2", "--parallelism.tensor_parallel_degree", "2"});
  EXPECT_NE(table.find("layers.0..2.attention.wq"), std::string::npos) << table;
  EXPECT_EQ(table.find("\noutput "), std::string::npos) << table;
}

TEST(PlanTable, ShowsOverlapOfAllOwnStages) {
  const std::string table =
      table_of(4, {"--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_schedule",
                   "ZBVZeroBubble", "--parallelism.tensor_parallel_degree", "2",
                   "--parallelism.enable_async_tensor_parallel"});
  const auto bytes = bytes_in(table);
  EXPECT_GT(bytes.at("layers.0,5.attention.wq"), 0) << table;
  ASSERT_NE(table.find("\nin products: "), std::string::npos) << table;
  EXPECT_EQ(table.find("\nin products: "), table.rfind("\nin products: ")) << table;
}

TEST(PlanTable, ComputesTheSmallestWorldFromTheDegrees) {
  EXPECT_EQ(smallest_world({}), 1);
  EXPECT_EQ(smallest_world({.data_parallel_replicate_degree = 2,
                            .data_parallel_shard_degree = 3,
                            .tensor_parallel_degree = 4,
                            .context = {.degree = 5},
                            .pipeline_parallel_degree = 2}),
            240);
}

}  // namespace
}  // namespace titan::train

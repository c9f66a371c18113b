// The tokens on each rank and the pairs that its blocks cover, for any number of ranks; and the sizes of a
// model with context parallelism, without data.

#include "titan/parallel/context_parallel.h"

#include <gtest/gtest.h>

#include "parallel/context/distributed_attention.h"
#include "parallel/scratch.h"
#include "titan/core/error.h"
#include "titan/dist/world.h"
#include "titan/models/llama3.h"
#include "titan/parallel/parameters.h"

namespace titan::context {
namespace {

using Case = std::tuple<int, ContextLoadBalancer>;

class SequenceLayoutTest : public ::testing::TestWithParam<Case> {
 protected:
  SequenceLayout layout() const { return {num_ranks(), std::get<1>(GetParam())}; }
  int num_ranks() const { return std::get<0>(GetParam()); }
  int64_t rank_length() const { return 3 * layout().chunks_per_rank(); }
  int64_t length() const { return rank_length() * num_ranks(); }
  at::Tensor positions(int rank) const { return layout().positions(rank, rank_length(), at::kCPU); }

  // Adds 1 for each pair of a query and a key that `block` covers.
  static void count(at::Tensor& met, const Block& block, const at::Tensor& queries, const at::Tensor& keys) {
    for (int64_t i = 0; i < block.num_rows; ++i)
      for (int64_t j = 0; j < std::min(block.num_keys, block.first_query + i + 1); ++j)
        met[queries[block.first_row + i]][keys[block.first_key + j]] += 1;
  }
  at::Tensor causal() const { return at::ones({length(), length()}, at::kLong).tril(); }
};

TEST_P(SequenceLayoutTest, RanksHoldEveryTokenOnceInAscendingOrder) {
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    all.push_back(positions(rank));
    EXPECT_TRUE((all.back().diff() > 0).all().item<bool>());
  }
  EXPECT_TRUE(at::equal(std::get<0>(at::cat(all).sort()), at::arange(length())));
}

TEST_P(SequenceLayoutTest, BlocksOfTheRingCoverTheCausalPairsOnce) {
  at::Tensor met = at::zeros({length(), length()}, at::kLong);
  for (int rank = 0; rank < num_ranks(); ++rank)
    for (int source = 0; source < num_ranks(); ++source)
      if (const auto block = layout().block(rank, source, rank_length()))
        count(met, *block, positions(rank), positions(source));
  EXPECT_TRUE(at::equal(met, causal()));
}

TEST_P(SequenceLayoutTest, BlocksOverGatheredKeysCoverTheCausalPairsOnce) {
  at::Tensor met = at::zeros({length(), length()}, at::kLong);
  for (int rank = 0; rank < num_ranks(); ++rank)
    for (int i = 0; i < layout().chunks_per_rank(); ++i)
      count(met, layout().block_of_whole(rank, i, rank_length()), positions(rank), at::arange(length()));
  EXPECT_TRUE(at::equal(met, causal()));
}

TEST_P(SequenceLayoutTest, PartsFollowThePositions) {
  const at::Tensor x = at::randn({2, length(), 3});
  for (int rank = 0; rank < num_ranks(); ++rank)
    EXPECT_TRUE(at::equal(layout().part(x, 1, rank), x.index_select(1, positions(rank))));
}

INSTANTIATE_TEST_SUITE_P(All, SequenceLayoutTest,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 7),
                                            ::testing::Values(ContextLoadBalancer::HeadTail,
                                                              ContextLoadBalancer::None)));

// This is the purpose of head-tail balancing.
TEST(HeadTail, GivesAllRanksTheSameNumberOfPairs) {
  const SequenceLayout layout(4, ContextLoadBalancer::HeadTail);
  for (int rank = 0; rank < 4; ++rank) {
    int64_t pairs = 0;
    for (int source = 0; source < 4; ++source) {
      const Block block = layout.block(rank, source, 10).value();
      for (int64_t i = 0; i < block.num_rows; ++i)
        pairs += std::min(block.num_keys, block.first_query + i + 1);
    }
    EXPECT_EQ(pairs, 40 * 41 / 2 / 4);
  }
}

TEST(SequenceLengths, AreRefusedUnlessTheyDivide) {
  const SequenceLayout head_tail(3, ContextLoadBalancer::HeadTail), plain(3, ContextLoadBalancer::None);
  EXPECT_NO_THROW(head_tail.check_length(12));
  EXPECT_NO_THROW(plain.check_length(9));
  EXPECT_THROW(head_tail.check_length(9), Error);
  EXPECT_THROW(head_tail.check_length(0), Error);
  EXPECT_THROW(plain.check_length(10), Error);
}

TEST(Scratch, SmallerTensorsOfAnyTypeReuseTheMemory) {
  Scratch buffer;
  const at::Tensor large = buffer.get({4, 6}, at::TensorOptions(at::kDouble));
  const at::Tensor small = buffer.get({3, 5}, at::TensorOptions(at::kBFloat16));
  EXPECT_EQ(small.scalar_type(), at::kBFloat16);
  EXPECT_EQ(small.sizes(), (at::IntArrayRef{3, 5}));
  EXPECT_EQ(small.data_ptr(), large.data_ptr());
  EXPECT_NE(buffer.get({5, 6}, at::TensorOptions(at::kDouble)).data_ptr(), nullptr);
}

// One process simulates one of 16 ranks, with sizes only, for 131,072 tokens.
TEST(ContextParallelOnMeta, ComputesSizesOfALongSequence) {
  const auto world = dist::init({.backend = "fake", .fake_rank = 5, .fake_world_size = 16});
  const DeviceMesh mesh = DeviceMesh::create(world, {{"cp", 16}});
  for (const ContextAttention attention : {ContextAttention::Ring, ContextAttention::AllGatherKv})
    for (const ContextRotateMethod rotate : {ContextRotateMethod::AllGather, ContextRotateMethod::AllToAll}) {
      const models::Llama3 model(models::llama3_flavors().at("debugmodel"), deferred(at::kMeta));
      context_parallel(model, mesh["cp"], {.rotate_method = rotate, .attention = attention});
      materialize(model, 0);
      const at::Tensor tokens = at::empty({1, 131072}, at::TensorOptions(at::kLong).device(at::kMeta));
      EXPECT_EQ(model(tokens).size(1), 131072 / 16);
      model(tokens, tokens, 131072).backward();
      for (const at::Tensor& parameter : model->parameters()) EXPECT_TRUE(parameter.grad().defined());
    }
}

}  // namespace
}  // namespace titan::context

#include "job/settings.h"

#include <set>

#include <gtest/gtest.h>

#include "titan/train/model_spec.h"

namespace titan::train {
namespace {

ParallelismSettings degrees(int64_t replicate, int64_t shard) {
  ParallelismSettings settings;
  settings.data_parallel_replicate_degree = replicate;
  settings.data_parallel_shard_degree = shard;
  return settings;
}

TEST(ParallelDims, ShardDegreeTakesWhatIsLeft) {
  for (const auto& [replicate, shard] : {std::pair(1, 8), std::pair(2, 4), std::pair(8, 1)}) {
    const ParallelDims dims = resolve_parallel_dims(degrees(replicate, -1), 8);
    EXPECT_EQ(dims.dp_shard, shard);
    EXPECT_FALSE(world_size_problem(dims, 8));
  }
}

TEST(ParallelDims, MustMultiplyToTheWorld) {
  for (auto settings : {degrees(1, 3), degrees(3, -1), degrees(16, -1), degrees(2, 8)}) {
    const auto problem = world_size_problem(resolve_parallel_dims(settings, 8), 8);
    ASSERT_TRUE(problem);
    EXPECT_NE(problem->find("the job has 8"), std::string::npos) << *problem;
  }
}

TEST(ParallelDims, CheckDivisibilityOfHeadsAndSequence) {
  std::vector<KeyedProblem> problems;
  const auto expect_one = [&](const std::string& key, const std::string& what) {
    ASSERT_EQ(problems.size(), 1u);
    EXPECT_EQ(problems[0].key, key);
    EXPECT_EQ(problems[0].what, what);
    problems.clear();
  };
  ParallelDims dims{.tp = 4, .pp = 1};
  ModelSizes sizes{.num_layers = 2, .num_heads = 6, .num_kv_heads = 2};
  check_divisibility(dims, sizes, 64, problems);
  expect_one("parallelism.tensor_parallel_degree",
             "doesn't divide the model's 6 heads and 2 kv heads; degrees that do: 1, 2");
  check_divisibility({.rows = {{"cp", 4, 2, "context_parallel_degree"}}}, sizes, 100, problems);
  expect_one("training.seq_len", "isn't a multiple of 2 x context_parallel_degree = 8; 96 or 104 would do");
  check_divisibility({.rows = {{"cp", 4, 1, "context_parallel_degree"}}}, sizes, 100, problems);
  EXPECT_TRUE(problems.empty());
  check_sequence_length({.rows = {{"cp", 4, 1, "context_parallel_degree"}}}, "validation.seq_len", 102,
                        problems);
  expect_one("validation.seq_len", "isn't a multiple of context_parallel_degree = 4; 100 or 104 would do");
  check_sequence_length({.rows = {{"cp", 4, 2, "context_parallel_degree"}}}, "validation.seq_len", 6,
                        problems);
  expect_one("validation.seq_len", "isn't a multiple of 2 x context_parallel_degree = 8; 8 would do");
  const ParallelDims two_axes{
      .rows = {{"cp", 2, 2, "context_parallel_degree"}, {"slices", 3, 1, "args.slices.degree"}}};
  check_sequence_length(two_axes, "training.seq_len", 16, problems);
  expect_one("training.seq_len",
             "isn't a multiple of 2 x context_parallel_degree x args.slices.degree = 12; 12 or 24 would do");
}

// 8 ranks as pipeline 2 x dp_shard 2 x tp 2: the pipeline is the slowest axis.
TEST(ParallelDims, LayOutTheRanks) {
  using Ranks = std::vector<int>;
  std::set<Ranks> pp, fsdp, tp, stage;
  for (int rank = 0; rank < 8; ++rank) {
    const Meshes meshes =
        build_meshes(dist::init({.backend = "fake", .fake_rank = rank, .fake_world_size = 8}),
                     {.dp_shard = 2, .tp = 2, .pp = 2});
    pp.insert(meshes.pp.ranks());
    fsdp.insert(meshes.fsdp.ranks());
    tp.insert(meshes.tp.ranks());
    stage.insert(meshes.stage.ranks());
    EXPECT_EQ(meshes.pp.rank(), rank / 4);
  }
  EXPECT_EQ(pp, (std::set<Ranks>{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
  EXPECT_EQ(fsdp, (std::set<Ranks>{{0, 2}, {1, 3}, {4, 6}, {5, 7}}));
  EXPECT_EQ(tp, (std::set<Ranks>{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
  EXPECT_EQ(stage, (std::set<Ranks>{{0, 1, 2, 3}, {4, 5, 6, 7}}));
}

TEST(ParallelDims, PipelineTakesItsShareOfTheWorld) {
  ParallelismSettings settings = degrees(1, -1);
  settings.pipeline_parallel_degree = 4;
  const ParallelDims dims = resolve_parallel_dims(settings, 8);
  EXPECT_FALSE(world_size_problem(dims, 8));
  EXPECT_EQ(dims.pp, 4);
  EXPECT_EQ(dims.dp_shard, 2);
}

TEST(ContextParallelSettings, BecomeOptions) {
  ParallelismSettings settings{.context = {.degree = 2}};
  EXPECT_EQ(resolve_parallel_dims(settings, 2).rows.at(0).parts_per_rank, 2);
  EXPECT_EQ(settings.context.options().load_balancer, ContextLoadBalancer::HeadTail);
  EXPECT_EQ(settings.context.options().rotate_method, ContextRotateMethod::AllGather);
  EXPECT_EQ(settings.context.options().attention, ContextAttention::Ring);
  settings.context = {
      .degree = 2, .load_balancer = "None", .rotate_method = "alltoall", .attention = "allgather_kv"};
  EXPECT_EQ(resolve_parallel_dims(settings, 2).rows.at(0).parts_per_rank, 1);
  EXPECT_EQ(settings.context.options().load_balancer, ContextLoadBalancer::None);
  EXPECT_EQ(settings.context.options().rotate_method, ContextRotateMethod::AllToAll);
  EXPECT_EQ(settings.context.options().attention, ContextAttention::AllGatherKv);
}

TEST(ReshardPolicy, Names) {
  using Kind = ReshardAfterForward::Kind;
  EXPECT_EQ(reshard_policy("default").kind, Kind::Default);
  EXPECT_EQ(reshard_policy("always").kind, Kind::Always);
  EXPECT_EQ(reshard_policy("never").kind, Kind::Never);
  EXPECT_EQ(reshard_policy("4").size, 4);
  EXPECT_THROW(reshard_policy("sometimes"), ConfigError);
}

}  // namespace
}  // namespace titan::train

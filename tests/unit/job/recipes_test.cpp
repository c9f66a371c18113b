// The recipes for many GPUs, built and run at their real sizes: meta tensors, one rank of the `fake` backend.

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <set>

#include <gtest/gtest.h>

#include "job/build.h"
#include "job/dry_run.h"
#include "titan/parallel/parameters.h"
#include "unit/job/load_preset.h"

namespace titan::train {
namespace {

struct Recipe {
  const char* name;
  int world_size;
};

class Recipes : public ::testing::TestWithParam<Recipe> {};

// The length of part `index` of `count` parts, as in torch.chunk.
int64_t chunk_length(int64_t size, int64_t count, int64_t index) {
  const int64_t length = (size + count - 1) / count;
  return std::clamp<int64_t>(size - index * length, 0, length);
}

// The sizes of this rank's part by the placements: tensor parallelism shards first, then FSDP shards its
// parts.
std::vector<int64_t> expected_sizes(const DTensor& data, const Meshes& meshes) {
  std::vector<int64_t> sizes = data.global_shape;
  const auto& axes = data.mesh.axes();
  for (const bool tensor_parallel : {true, false})
    for (size_t i = 0; i < axes.size(); ++i)
      if (data.placements[i].is_shard() && (axes[i].name == "tp") == tensor_parallel) {
        int64_t& size = sizes[static_cast<size_t>(data.placements[i].dim)];
        const DeviceMesh& mesh = tensor_parallel ? meshes.tp : meshes.fsdp;
        const std::string& axis = axes[i].name;
        size = chunk_length(size, axes[i].size, mesh.coordinate(axis));
      }
  return sizes;
}

std::vector<Parameter> all_parameters(const DryRun& run) {
  std::vector<Parameter> all;
  for (const auto& model : run.models())
    for (const Parameter& parameter : parameters(model->root())) all.push_back(parameter);
  return all;
}

double max_resident_gigabytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / (1024 * 1024);
}

void expect_own_part_only(const Parameter& parameter, const Meshes& meshes) {
  EXPECT_TRUE(parameter.data.local.is_meta()) << parameter.name;
  EXPECT_EQ(parameter.data.local.sizes(), expected_sizes(parameter.data, meshes)) << parameter.name;
}

TEST_P(Recipes, BuildAndRunAtRealSize) {
  const auto [name, world_size] = GetParam();
  const auto start = std::chrono::steady_clock::now();
  const JobConfig config = load_preset(name, world_size);
  for (const int rank : {0, world_size / 2 + 1, world_size - 1}) {
    SCOPED_TRACE(str("rank ", rank));
    DryRun run(config, world_size, rank);
    run.run_micro_batch();

    int64_t mine = 0, rows = 0;
    double total = 0;
    for (const Parameter& parameter : all_parameters(run)) {
      const at::Tensor& local = parameter.data.local;
      expect_own_part_only(parameter, run.meshes());
      ASSERT_TRUE(local.grad().defined()) << parameter.name;
      EXPECT_EQ(local.grad().sizes(), local.sizes()) << parameter.name;
      mine += local.numel();
      total += static_cast<double>(parameter.data.global_numel());
      // The most that norms, which tp replicates, and rounding up along a sharded dimension may add.
      rows += parameter.data.global_numel() / parameter.data.global_shape[0];
    }
    if (run.meshes().pp.size() == 1) {
      EXPECT_EQ(total, static_cast<double>(config.spec().sizes(config.args()).num_params));
    }
    const double share =
        total / (run.meshes().tp.size() * run.meshes().fsdp.size(run.meshes().fsdp.axes().back().name));
    EXPECT_NEAR(static_cast<double>(mine), share, 0.01 * share + static_cast<double>(rows));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
  EXPECT_LT(max_resident_gigabytes(), 1.0);
}

const auto name_of_recipe = [](const auto& info) { return std::string(info.param.name); };

INSTANTIATE_TEST_SUITE_P(All, Recipes,
                         ::testing::Values(Recipe{"llama3_8b_2d", 8}, Recipe{"llama3_8b_3d", 8},
                                           Recipe{"llama3_8b_long", 8}, Recipe{"llama3_70b_2d", 256},
                                           Recipe{"llama3_70b_3d", 256}, Recipe{"llama3_405b_2d", 512},
                                           Recipe{"llama3_405b_3d", 512}, Recipe{"llama3_405b_pp", 512},
                                           Recipe{"llama3_405b_pp_interleaved", 512}),
                         name_of_recipe);

class PipelineRecipes : public ::testing::TestWithParam<Recipe> {};

// One rank of each stage: together they have every parameter once.
TEST_P(PipelineRecipes, StagesCoverTheModelOnce) {
  const auto [name, world_size] = GetParam();
  const JobConfig config = load_preset(name, world_size);
  double total = 0;
  std::set<std::string> names;
  for (int pp_rank = 0; pp_rank < 16; ++pp_rank) {
    const DryRun run(config, world_size, world_size / 16 * pp_rank + pp_rank);
    ASSERT_EQ(run.meshes().pp.rank(), pp_rank);
    for (const Parameter& parameter : all_parameters(run)) {
      expect_own_part_only(parameter, run.meshes());
      EXPECT_TRUE(names.insert(parameter.name).second) << parameter.name;
      total += static_cast<double>(parameter.data.global_numel());
    }
  }
  EXPECT_EQ(total, static_cast<double>(config.spec().sizes(config.args()).num_params));
}

INSTANTIATE_TEST_SUITE_P(All, PipelineRecipes,
                         ::testing::Values(Recipe{"llama3_405b_pp", 512},
                                           Recipe{"llama3_405b_pp_interleaved", 512}),
                         name_of_recipe);

// Uses real memory, not meta tensors: a rank of 70B whose stage is one layer of 3.4 GB allocates only its
// part of it.
TEST(PipelineStageMemory, AllocatesOnlyTheRanksPart) {
  const int stages = 82, ranks_of_stage = 128, world_size = stages * ranks_of_stage;
  const JobConfig config = load_preset("llama3_70b_2d", world_size,
                                       {"--parallelism.pipeline_parallel_degree", std::to_string(stages),
                                        "--parallelism.pipeline_parallel_schedule", "GPipe",
                                        "--parallelism.data_parallel_shard_degree", "16"});
  const StagePlan plan = plan_stages(config);
  const auto start = std::chrono::steady_clock::now();
  for (const int stage : {0, 40, stages - 1}) {
    const dist::World world = dist::init(
        {.backend = "fake", .fake_rank = stage * ranks_of_stage + stage, .fake_world_size = world_size});
    const auto models = build_stages(config, plan, build_job_meshes(config, world), at::kCPU);
    ASSERT_EQ(models.size(), 1u);
    int64_t whole = 0;
    std::map<const void*, size_t> memory;  // by address: parameters may share memory
    for (const Parameter& parameter : parameters(models[0]->root())) {
      const auto& storage = parameter.data.local.storage();
      memory[storage.data()] = storage.nbytes();
      whole += 4 * parameter.data.global_numel();
    }
    int64_t bytes = 0;
    for (const auto& [address, size] : memory) bytes += static_cast<int64_t>(size);
    EXPECT_GT(whole, int64_t{3} << 30);
    EXPECT_LT(bytes, whole / ranks_of_stage + (int64_t{1} << 20)) << "stage " << stage;
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
  EXPECT_LT(max_resident_gigabytes(), 1.0);
}

}  // namespace
}  // namespace titan::train

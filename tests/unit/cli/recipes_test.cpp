// The recipes for many GPUs, built and run at their real sizes: meta tensors, one rank of the `fake` backend.

#include <sys/resource.h>

#include <algorithm>
#include <chrono>

#include <gtest/gtest.h>

#include "titan/parallel/parameters.h"
#include "titan/train/dry_run.h"
#include "unit/cli/load_preset.h"

namespace titan::cli {
namespace {

struct Recipe {
  const char* name;
  int world_size;
};

class Recipes : public ::testing::TestWithParam<Recipe> {};

// Elements along `dim` of part `index` of `count`, as torch.chunk.
int64_t chunk_length(int64_t size, int64_t count, int64_t index) {
  const int64_t length = (size + count - 1) / count;
  return std::clamp<int64_t>(size - index * length, 0, length);
}

// What the placements say of this rank's part: tensor parallelism cuts first, FSDP its parts.
std::vector<int64_t> expected_sizes(const DTensor& data, const train::Meshes& meshes) {
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

double max_resident_gigabytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / (1024 * 1024);
}

TEST_P(Recipes, BuildAndRunAtTheirRealSize) {
  const auto [name, world_size] = GetParam();
  const auto start = std::chrono::steady_clock::now();
  const train::JobConfig config = load_preset(name, world_size);
  for (const int rank : {0, world_size / 2 + 1, world_size - 1}) {
    SCOPED_TRACE(str("rank ", rank));
    train::DryRun run(config, world_size, rank);
    run.run_micro_batch();

    const auto list = parameters(run.model().root());
    int64_t mine = 0, rows = 0;
    double total = 0;
    for (const Parameter& parameter : list) {
      const at::Tensor& local = parameter.data.local;
      EXPECT_TRUE(local.is_meta()) << parameter.name;
      EXPECT_EQ(local.sizes(), expected_sizes(parameter.data, run.meshes())) << parameter.name;
      ASSERT_TRUE(local.grad().defined()) << parameter.name;
      EXPECT_EQ(local.grad().sizes(), local.sizes()) << parameter.name;
      mine += local.numel();
      total += static_cast<double>(parameter.data.global_numel());
      // The most that rounding up along a cut dimension and norms kept whole by tp may add.
      rows += parameter.data.global_numel() / parameter.data.global_shape[0];
    }
    EXPECT_EQ(total, static_cast<double>(config.spec().sizes(config.args()).num_params));
    const double share =
        total / (run.meshes().tp.size() * run.meshes().fsdp.size(run.meshes().fsdp.axes().back().name));
    EXPECT_NEAR(static_cast<double>(mine), share, 0.01 * share + static_cast<double>(rows));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
  EXPECT_LT(max_resident_gigabytes(), 1.0);
}

INSTANTIATE_TEST_SUITE_P(All, Recipes,
                         ::testing::Values(Recipe{"llama3_8b_2d", 8}, Recipe{"llama3_8b_long", 8},
                                           Recipe{"llama3_70b_2d", 256}, Recipe{"llama3_70b_3d", 256},
                                           Recipe{"llama3_405b_2d", 512}, Recipe{"llama3_405b_3d", 512}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace titan::cli

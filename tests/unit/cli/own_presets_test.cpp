// The configs that ship with LibTitan pass every check that needs no files, on the ranks that they are for.

#include <gtest/gtest.h>

#include "cli/builtin_models.h"
#include "titan/train/job_config.h"

namespace titan::cli {
namespace {

std::vector<std::string> problems_of(const std::string& preset, int world_size,
                                     std::vector<std::string> overrides = {}) {
  register_builtin_models();
  train::JobConfig config;
  const auto file = std::filesystem::path(TITAN_SOURCE_DIR) / "configs" / (preset + ".toml");
  try {
    config::Origins origins = load(train::job_schema(), {file, std::move(overrides)}, config);
    train::check_job(config, origins, world_size, train::JobFiles::Ignore);
    return {};
  } catch (const ConfigError& error) {
    return error.problems();
  }
}

TEST(OwnPresets, FitTheRanksTheyAreFor) {
  const std::vector<std::pair<std::string, std::vector<int>>> presets = {
      {"llama3_debug", {1, 2, 3, 4}}, {"llama3_8b", {8, 16}}, {"llama3_70b", {64}}, {"llama3_405b", {512}}};
  for (const auto& [preset, sizes] : presets)
    for (int size : sizes) {
      auto problems = problems_of(preset, size);
      EXPECT_TRUE(problems.empty()) << preset << " on " << size << ": " << ConfigError(problems).what();
    }
}

TEST(OwnPresets, ADegreeThatDoesNotFitIsSeen) {
  EXPECT_EQ(problems_of("llama3_8b", 8, {"--parallelism.data_parallel_shard_degree", "3"}).size(), 1u);
  EXPECT_EQ(problems_of("llama3_8b", 8, {"--parallelism.fsdp_reshard_after_forward", "3"}).size(), 1u);
}

}  // namespace
}  // namespace titan::cli

// The configs that ship with LibTitan pass every check that needs no files, on the numbers of ranks that they
// are for.

#include <gtest/gtest.h>

#include "cli/commands.h"
#include "titan/core/error.h"
#include "unit/job/load_preset.h"

namespace titan::cli {
namespace {

std::vector<std::string> problems_of(const std::string& preset, int world_size,
                                     std::vector<std::string> overrides = {}) {
  register_builtin_models();
  try {
    train::load_preset(preset, world_size, std::move(overrides));
    return {};
  } catch (const ConfigError& error) {
    return error.problems();
  }
}

TEST(OwnPresets, PassAllChecksOnTheirNumbersOfRanks) {
  const std::vector<std::pair<std::string, std::vector<int>>> presets = {
      {"llama3_debug", {1, 2, 3, 4}},
      {"llama3_8b", {8, 16}},
      {"llama3_70b", {64}},
      {"llama3_405b", {512}},
      {"llama3_8b_2d", {8}},
      {"llama3_8b_3d", {8}},
      {"llama3_8b_long", {8}},
      {"llama3_70b_2d", {256}},
      {"llama3_70b_3d", {256}},
      {"llama3_405b_2d", {512}},
      {"llama3_405b_3d", {512}},
      {"llama3_405b_pp", {512}},
      {"llama3_405b_pp_interleaved", {512}}};
  for (const auto& [preset, sizes] : presets)
    for (int size : sizes) {
      auto problems = problems_of(preset, size);
      EXPECT_TRUE(problems.empty()) << preset << " on " << size << ": " << ConfigError(problems).what();
    }
}

TEST(OwnPresets, RefuseADegreeThatDoesNotFit) {
  EXPECT_EQ(problems_of("llama3_8b", 8, {"--parallelism.data_parallel_shard_degree", "3"}).size(), 1u);
  EXPECT_EQ(problems_of("llama3_8b", 8, {"--parallelism.fsdp_reshard_after_forward", "3"}).size(), 1u);
}

}  // namespace
}  // namespace titan::cli

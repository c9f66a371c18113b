// TorchTitan's own Llama configs are accepted unchanged. A feature that does not exist here is refused with a
// remedy.

#include <gtest/gtest.h>

#include "cli/commands.h"
#include "job/job_config.h"
#include "unit/cli/words.h"

namespace titan::cli {
namespace {

constexpr int kWorldSize = 8;

// Without the files: their data and tokenizers aren't here.
std::vector<std::string> problems_of(const std::string& preset, std::vector<std::string> overrides = {},
                                     train::JobFiles files = train::JobFiles::Ignore) {
  register_builtin_models();
  train::JobConfig config;
  std::filesystem::path file = std::filesystem::path(TITAN_SOURCE_DIR) / "tests/data/torchtitan" / preset;
  try {
    const auto origins = load(train::job_schema(), {file, std::move(overrides)}, config);
    check_job(config, origins, kWorldSize, files);
    return {};
  } catch (const ConfigError& error) {
    return error.problems();
  }
}

class Preset : public ::testing::TestWithParam<std::string> {};

TEST_P(Preset, IsAcceptedUnchanged) {
  std::vector<std::string> problems = problems_of(GetParam());
  EXPECT_TRUE(problems.empty()) << ConfigError(problems).what();
}

// The two edits of docs/from_torchtitan.md; without them, the errors name what to use instead.
TEST_P(Preset, NeedsATokenizerAndData) {
  const std::string root = TITAN_SOURCE_DIR;
  const Words edits = {"--model.hf_assets_path",  root + "/assets/tokenizer",
                       "--training.dataset",      "jsonl",
                       "--training.dataset_path", root + "/tests/unit/data/tokenizer_golden.json"};
  EXPECT_EQ(problems_of(GetParam(), edits, train::JobFiles::Check), Words{});
  const Words without = problems_of(GetParam(), {}, train::JobFiles::Check);
  ASSERT_EQ(without.size(), 2u);
  EXPECT_NE(without[0].find("model.hf_assets_path"), std::string::npos) << without[0];
  EXPECT_NE(without[1].find("use \"jsonl\" with dataset_path"), std::string::npos) << without[1];
}

using Problems = std::vector<std::string>;

// Includes keys that TorchTitan reads only when their feature is on.
TEST_P(Preset, RefusesInvalidValues) {
  const std::vector<std::pair<std::string, std::string>> nonsense = {
      {"--checkpoint.async_mode", "nonsense"},
      {"--checkpoint.keep_latest_k", "1"},
      {"--parallelism.pipeline_parallel_schedule", "nonsense"},
      {"--parallelism.context_parallel_load_balancer", "nonsense"},
      {"--activation_checkpoint.selective_ac_option", "0"},
      {"--compile.components", "modle"},
      {"--quantize.linear.float8.recipe_name", "nonsense"},
      {"--fault_tolerance.process_group", "nonsense"},
      {"--profiling.profile_freq", "0"},
      {"--optimizer.lr", "inf"},
      {"--optimizer.beta1", "1"},
      {"--optimizer.beta2", "1"}};
  for (const auto& [key, value] : nonsense)
    EXPECT_EQ(problems_of(GetParam(), {key, value}).size(), 1u) << key;
}

TEST_P(Preset, AcceptsCheckpointSettings) {
  const Words on = {"--checkpoint.enable", "--checkpoint.interval", "1000"};
  for (const Words& words :
       {Words{}, Words{"--checkpoint.async_mode", "async"}, Words{"--checkpoint.keep_latest_k", "2"},
        Words{"--checkpoint.no_last_save_model_only"}})
    EXPECT_EQ(problems_of(GetParam(), on + words), Problems{});
  EXPECT_EQ(problems_of(GetParam(), on + Words{"--checkpoint.exclude_from_loading", "model"}).size(), 1u);
}

INSTANTIATE_TEST_SUITE_P(Llama, Preset, ::testing::Values("debug.toml", "llama3_8b.toml"),
                         [](const auto& info) { return info.param.substr(0, info.param.find('.')); });

}  // namespace
}  // namespace titan::cli

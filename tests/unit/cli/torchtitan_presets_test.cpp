// TorchTitan's own Llama configs are read as they are, but for what doesn't exist yet: the problems listed
// here, each with its remedy.

#include <gtest/gtest.h>

#include "cli/builtin_models.h"
#include "titan/train/job_config.h"

namespace titan::cli {
namespace {

std::vector<std::string> problems_of(const std::string& preset, std::vector<std::string> overrides = {}) {
  register_builtin_models();
  train::JobConfig config;
  std::filesystem::path file = std::filesystem::path(TITAN_SOURCE_DIR) / "tests/data/torchtitan" / preset;
  try {
    load(train::job_schema(), {file, std::move(overrides)}, config);
    return {};
  } catch (const ConfigError& error) {
    return error.problems();
  }
}

class Preset : public testing::TestWithParam<std::string> {};

TEST_P(Preset, OnlyActivationCheckpointingIsRefused) {
  std::vector<std::string> problems = problems_of(GetParam());
  ASSERT_EQ(problems.size(), 1u) << ConfigError(problems).what();
  EXPECT_NE(problems.front().find("activation_checkpoint.mode = \"selective\": not supported"),
            std::string::npos)
      << problems.front();
}

TEST_P(Preset, IsReadWithoutIt) {
  std::vector<std::string> problems = problems_of(GetParam(), {"--activation_checkpoint.mode", "none"});
  EXPECT_TRUE(problems.empty()) << ConfigError(problems).what();
}

INSTANTIATE_TEST_SUITE_P(Llama, Preset, testing::Values("debug.toml", "llama3_8b.toml"),
                         [](const auto& info) { return info.param.substr(0, info.param.find('.')); });

}  // namespace
}  // namespace titan::cli

#include "cli/train.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "titan/config/load.h"
#include "titan/core/error.h"

namespace titan::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// The problem that a rank finds in its settings when `by` may restart it `max_restarts` times; "" if none.
std::string refusal_of(const std::string& by, int max_restarts, const std::vector<std::string>& settings) {
  register_builtin_models();
  train::JobConfig config;
  const config::Origins origins = config::load(train::job_schema(), {"", settings}, config);
  dist::Launch launch;
  launch.by = by;
  launch.max_restarts = max_restarts;
  try {
    check_launched_restarts(launch, config, origins);
    return "";
  } catch (const ConfigError& error) {
    return error.what();
  }
}

TEST(LaunchTrain, RestartedRanksRefuseAFixedLoadStep) {
  const std::vector<std::string> saves = {"--checkpoint.enable"};
  const std::vector<std::string> goes_back = {"--checkpoint.enable", "--checkpoint.load_step", "5",
                                              "--checkpoint.exclude_from_loading", "optimizer"};
  for (const char* by : {"titan", "torchrun"}) {
    EXPECT_EQ(refusal_of(by, 3, saves), "");
    EXPECT_EQ(refusal_of(by, 0, goes_back), "") << "without restarts the step is loaded once";
    EXPECT_THAT(refusal_of(by, 3, goes_back),
                AllOf(HasSubstr("--checkpoint.load_step = 5: with --max-restarts must be -1"),
                      HasSubstr("exclude_from_loading"), HasSubstr("with --max-restarts must be empty")));
  }
}

// torchrun's agents restart ranks by default.
TEST(LaunchTrain, RefusesRestartsWithoutSaves) {
  const std::vector<std::string> load_only = {"--checkpoint.enable", "--checkpoint.load_only"};
  EXPECT_THAT(refusal_of("titan", 3, {}), HasSubstr("checkpoint.enable"));
  EXPECT_THAT(refusal_of("titan", 3, load_only),
              AllOf(HasSubstr("load_only"), HasSubstr("must be false"), Not(HasSubstr("must be true"))));
  EXPECT_EQ(refusal_of("torchrun", 3, {}), "");
}

}  // namespace
}  // namespace titan::cli

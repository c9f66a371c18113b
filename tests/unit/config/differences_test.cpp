#include "titan/config/load.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace titan::config {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

constexpr const char* kBefore = "# a run\n[training]\nsteps = 10\n# seed = unset\n\n[job]\nfolder = \"a\"\n";
constexpr const char* kNow =
    "[training]\nsteps = 20\nseed = 3\n[job]\nfolder = \"b\"\n[model.args]\ndim = 4\n";

TEST(SettingDifferences, ReadsPrintedSettings) {
  EXPECT_THAT(printed_settings(kNow), ElementsAre(Pair("job.folder", "\"b\""), Pair("model.args.dim", "4"),
                                                  Pair("training.seed", "3"), Pair("training.steps", "20")));
}

TEST(SettingDifferences, NamesBothValues) {
  EXPECT_THAT(setting_differences(kBefore, kNow),
              ElementsAre("job.folder: \"a\" | \"b\"", "model.args.dim: unset | 4",
                          "training.seed: unset | 3", "training.steps: 10 | 20"));
}

TEST(SettingDifferences, SkipsTables) {
  EXPECT_THAT(setting_differences(kBefore, kNow, {"job", "model"}),
              ElementsAre("training.seed: unset | 3", "training.steps: 10 | 20"));
  EXPECT_THAT(setting_differences(kNow, kNow), ElementsAre());
}

}  // namespace
}  // namespace titan::config

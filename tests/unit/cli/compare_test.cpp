#include "cli/run_folder.h"

#include <gtest/gtest.h>

#include <fstream>

#include "titan/core/error.h"

namespace titan::cli {
namespace {

std::filesystem::path run_folder(const std::string& name, const std::string& config,
                                 const std::string& metrics) {
  auto folder = std::filesystem::path(::testing::TempDir()) / "run_record_test" / name;
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "config.toml") << config;
  std::ofstream(folder / "metrics.jsonl") << metrics;
  return folder;
}

TEST(Compare, ReadsSettingsAndSteps) {
  RunFolder run =
      read_compared_run(run_folder("a", "# by hand\n[job]\ndump_folder = \"a\"\n\n[optimizer]\nlr = 0.001\n",
                                   "{\"step\": 1, \"loss\": 3.5, \"tps\": 10, \"step_s\": 1}\n"
                                   "{\"step\": 2, \"loss\": 3.25, \"tps\": 30, \"step_s\": 0.5}\n"));
  EXPECT_EQ(run.setting("optimizer.lr"), "0.001");
  EXPECT_EQ(run.setting("optimizer.eps"), "");
  EXPECT_EQ(run.steps.last("loss"), 3.25);
  EXPECT_EQ(median_after_first(run.steps.curve("tps")), 30);
  EXPECT_EQ(keys_of({run}), (std::set<std::string>{"optimizer.lr"}));
}

TEST(Compare, FindsTheFirstStepWithDifferentLosses) {
  const RunFolder a =
      read_compared_run(run_folder("part_a", "",
                                   "{\"step\": 1, \"loss\": 1}\n{\"step\": 5, \"loss\": 0.5}\n"
                                   "{\"step\": 9, \"loss\": 0.25}\n"));
  const RunFolder b =
      read_compared_run(run_folder("part_b", "",
                                   "{\"step\": 1, \"loss\": 1}\n{\"step\": 5, \"loss\": 0.75}\n"
                                   "{\"step\": 10, \"loss\": 0}\n"));
  auto steps = common_steps({a, b}, &RunFolder::steps);
  EXPECT_EQ(steps, (std::vector<int64_t>{1, 5}));
  LossDifference found = compare_losses(a.steps, b.steps, steps);
  EXPECT_EQ(found.first_step, 5);
  EXPECT_EQ(found.largest_difference, 0.25);
  EXPECT_FALSE(compare_losses(a.steps, a.steps, steps).first_step);
}

TEST(Compare, ComparesValidationLossesSeparately) {
  const std::string config, metrics = "{\"step\": 1, \"loss\": 3}\n{\"step\": 2, \"loss\": 2}\n";
  const auto validated = run_folder("validated", config, metrics);
  std::ofstream(validated / "validation.jsonl")
      << "{\"step\": 1, \"loss\": 3.5, \"tps\": 7}\n{\"step\": 2, \"loss\": 2.5, \"tps\": 7}\n";
  const auto other = run_folder("validated_once", config, metrics);
  std::ofstream(other / "validation.jsonl") << "{\"step\": 2, \"loss\": 2.75, \"tps\": 7}\n";
  const RunFolder a = read_compared_run(validated), b = read_compared_run(other);
  const RunFolder none = read_compared_run(run_folder("not_validated", config, metrics));
  EXPECT_EQ(a.validations.value(0, "loss"), 3.5);
  const auto steps = common_steps({a, b}, &RunFolder::validations);
  EXPECT_EQ(steps, std::vector<int64_t>{2});
  EXPECT_EQ(compare_losses(a.validations, b.validations, steps).largest_difference, 0.25);
  EXPECT_TRUE(common_steps({a, none}, &RunFolder::validations).empty());
}

TEST(Compare, IgnoresAnIncompleteLastLine) {
  for (const char* torn : {"{\"step\": 2, \"lo", "{\"step\": 2, \"loss\": 1"}) {
    const RunFolder run =
        read_compared_run(run_folder("torn", "", std::string("{\"step\": 1, \"loss\": 2}\n") + torn));
    ASSERT_EQ(run.steps.size(), 1u);
    EXPECT_EQ(run.steps.last("loss"), 2);
  }
}

TEST(Compare, NamesALineThatIsNotAStep) {
  auto folder = run_folder("broken", "", "{\"step\": 1}\nnonsense\n");
  try {
    read_compared_run(folder);
    FAIL() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("metrics.jsonl:2"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace titan::cli

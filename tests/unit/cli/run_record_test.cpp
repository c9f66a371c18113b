#include "cli/run/run_folder.h"

#include <gtest/gtest.h>

#include <fstream>

#include "titan/core/error.h"

namespace titan::cli {
namespace {

std::filesystem::path run_folder(const std::string& name, const std::string& config,
                                 const std::string& metrics) {
  auto folder = std::filesystem::path(testing::TempDir()) / "run_record_test" / name;
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "config.toml") << config;
  std::ofstream(folder / "metrics.jsonl") << metrics;
  return folder;
}

TEST(RunRecord, ReadsSettingsAndSteps) {
  RunRecord run =
      read_run(run_folder("a", "# by hand\n[job]\ndump_folder = \"a\"\n\n[optimizer]\nlr = 0.001\n",
                          "{\"step\": 1, \"loss\": 3.5, \"tps\": 10, \"step_s\": 1}\n"
                          "{\"step\": 2, \"loss\": 3.25, \"tps\": 30, \"step_s\": 0.5}\n"));
  EXPECT_EQ(run.setting("optimizer.lr"), "0.001");
  EXPECT_EQ(run.setting("optimizer.eps"), "unset");
  EXPECT_EQ(run.steps.at(2).loss, 3.25);
  EXPECT_EQ(run.median_tps(), 30);
  EXPECT_EQ(keys_of({run}), (std::set<std::string>{"optimizer.lr"}));
}

TEST(RunRecord, LossesPartAtTheFirstOtherDouble) {
  RunRecord a{.folder = "a", .steps = {{1, {.loss = 1}}, {5, {.loss = 0.5}}, {9, {.loss = 0.25}}}};
  RunRecord b{.folder = "b", .steps = {{1, {.loss = 1}}, {5, {.loss = 0.75}}, {10, {.loss = 0}}}};
  auto steps = common_steps({a, b}, &RunRecord::steps);
  EXPECT_EQ(steps, (std::vector<int64_t>{1, 5}));
  Parting parting = compare_losses(a.steps, b.steps, steps);
  EXPECT_EQ(parting.first_step, 5);
  EXPECT_EQ(parting.largest_difference, 0.25);
  EXPECT_FALSE(compare_losses(a.steps, a.steps, steps).first_step);
}

TEST(RunRecord, ValidationLossesAreASeriesOfTheirOwn) {
  const std::string config, metrics = "{\"step\": 1, \"loss\": 3}\n{\"step\": 2, \"loss\": 2}\n";
  const auto validated = run_folder("validated", config, metrics);
  std::ofstream(validated / "validation.jsonl")
      << "{\"step\": 1, \"loss\": 3.5, \"tps\": 7}\n{\"step\": 2, \"loss\": 2.5, \"tps\": 7}\n";
  const auto other = run_folder("validated_once", config, metrics);
  std::ofstream(other / "validation.jsonl") << "{\"step\": 2, \"loss\": 2.75, \"tps\": 7}\n";
  const RunRecord a = read_run(validated), b = read_run(other);
  const RunRecord none = read_run(run_folder("not_validated", config, metrics));
  EXPECT_EQ(a.validations.at(1).loss, 3.5);
  const auto steps = common_steps({a, b}, &RunRecord::validations);
  EXPECT_EQ(steps, std::vector<int64_t>{2});
  EXPECT_EQ(compare_losses(a.validations, b.validations, steps).largest_difference, 0.25);
  EXPECT_TRUE(common_steps({a, none}, &RunRecord::validations).empty());
}

TEST(RunRecord, ATornLastLineIsLeftOut) {
  for (const char* torn : {"{\"step\": 2, \"lo", "{\"step\": 2, \"loss\": 1"}) {
    const RunRecord run =
        read_run(run_folder("torn", "", std::string("{\"step\": 1, \"loss\": 2}\n") + torn));
    ASSERT_EQ(run.steps.size(), 1u);
    EXPECT_EQ(run.steps.at(1).loss, 2);
  }
}

TEST(RunRecord, NamesTheLineThatIsNoStep) {
  auto folder = run_folder("broken", "", "{\"step\": 1}\nnonsense\n");
  try {
    read_run(folder);
    FAIL() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("metrics.jsonl:2"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace titan::cli

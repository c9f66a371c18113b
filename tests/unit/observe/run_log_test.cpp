// The rows of an earlier run, when a run resumes or starts afresh.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "core/durable.h"
#include "observe/metrics_format.h"
#include "titan/observe/metrics.h"
#include "unit/data/temporary_folder.h"

namespace titan::train {
namespace {

namespace fs = std::filesystem;

std::string text_of(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

TEST(RunLog, KeepsRowsUpToAStep) {
  data::TemporaryFolder folder;
  const fs::path path = folder.path() / "rows.jsonl";
  const std::string first = "{\"step\": 1, \"loss\": 2.5}\n", tenth = "{\"step\": 10, \"loss\": null}\n";
  std::ofstream(path) << first << tenth << "{\"step\": 11, \"loss\": 1}\n";
  EXPECT_EQ(keep_rows_up_to(10, path), 0);
  EXPECT_EQ(text_of(path), first + tenth);
  keep_rows_up_to(9, path);
  EXPECT_EQ(text_of(path), first);
}

TEST(RunLog, RemovesLinesThatAreNotRows) {
  data::TemporaryFolder folder;
  const fs::path path = folder.path() / "rows.jsonl";
  const std::string row = "{\"step\": 1, \"loss\": 2.5}\n";
  // Half a row of a killed run, a row without its end that still parses, and lines of another program.
  for (const std::string& rest :
       {"{\"step\": 2, \"lo", "{\"step\": 2}", "\n", "[2]\n", "{\"stop\": 2}\n", "{\"step\": \"2\"}\n"}) {
    std::ofstream(path) << row << rest;
    EXPECT_EQ(keep_rows_up_to(5, path), 1);
    EXPECT_EQ(text_of(path), row) << rest;
  }
  std::ofstream(folder.path() / "metrics.jsonl") << row << "{\"step\": 2, \"lo";
  ::testing::internal::CaptureStderr();
  MetricsLogger({.settings = {}, .folder = folder.path()}).begin_after(5);
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("metrics.jsonl: removed 1 incomplete row(s)"),
            std::string::npos);
  keep_rows_up_to(5, folder.path() / "none.jsonl");
  EXPECT_FALSE(fs::exists(folder.path() / "none.jsonl"));
}

StepMetrics metrics_of(int64_t step) {
  StepMetrics metrics;
  metrics.step = step;
  return metrics;
}

TEST(RunLog, LoggerTruncatesOrAppends) {
  data::TemporaryFolder folder;
  const auto log = [&](std::optional<int64_t> after, int64_t step) {
    MetricsLogger logger({.settings = {}, .folder = folder.path()});
    if (after) logger.begin_after(*after);
    logger.logged(metrics_of(step));
    logger.validated(ValidationMetrics{.step = step});
  };
  const fs::path rows = folder.path() / "metrics.jsonl", validation = folder.path() / "validation.jsonl";
  const std::string one = json_line(metrics_of(1)) + "\n", two = json_line(metrics_of(2)) + "\n",
                    three = json_line(metrics_of(3)) + "\n";
  log({}, 1);
  log(1, 2);
  EXPECT_EQ(text_of(rows), one + two);
  log(1, 3);
  EXPECT_EQ(text_of(rows), one + three);
  EXPECT_EQ(text_of(validation),
            json_line(ValidationMetrics{.step = 1}) + "\n" + json_line(ValidationMetrics{.step = 3}) + "\n");
  log({}, 2);
  EXPECT_EQ(text_of(rows), two);
  EXPECT_EQ(text_of(folder.path() / "metrics.1.jsonl"), one + three) << "the earlier run is kept";
  EXPECT_TRUE(fs::exists(folder.path() / "validation.1.jsonl"));
  EXPECT_EQ(text_of(validation), json_line(ValidationMetrics{.step = 2}) + "\n");
}

}  // namespace
}  // namespace titan::train

#include "titan/observe/metrics.h"

#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "core/file.h"
#include "observe/metrics_format.h"
#include "titan/core/error.h"
#include "unit/data/temporary_folder.h"

namespace titan::train {
namespace {

StepMetrics sample() {
  StepMetrics metrics;
  metrics.step = 7;
  metrics.loss = 1.0 / 3;
  metrics.grad_norm = 12.34567;
  metrics.lr = 8e-4;
  metrics.tps = 1234567.4;
  metrics.tflops = 1234.567;
  metrics.memory_gib = 1.5;
  metrics.memory_percent = 2.25;
  metrics.n_tokens_seen = 9007199254740993;
  return metrics;
}

TEST(ConsoleLine, HasTheFieldsOfTorchTitan) {
  EXPECT_EQ(console_line(sample(), false),
            "step:  7  loss:  0.33333  grad_norm: 12.3457  memory:  1.50GiB(2.25%)  tps: 1,234,567  "
            "tflops: 1,234.57  mfu: N/A");
}

TEST(ConsoleLine, ShowsMfuWhenThePeakIsKnown) {
  StepMetrics metrics = sample();
  metrics.mfu = 41.267;
  EXPECT_NE(console_line(metrics, false).find("mfu: 41.27%"), std::string::npos);
}

TEST(ConsoleLine, ShowsTheShareOfThePlanBesideMfu) {
  StepMetrics metrics = sample();
  metrics.mfu = 41.267;
  metrics.percent_of_plan = 93.04;
  EXPECT_NE(console_line(metrics, false).find("mfu: 41.27%  of plan: 93.0%"), std::string::npos);
}

TEST(ConsoleLine, HasColors) {
  std::string line = console_line(sample(), true);
  EXPECT_EQ(line.find("\033[31mstep:"), 0u);
  EXPECT_EQ(line.substr(line.size() - 5), "\033[39m");
}

TEST(ConsoleLine, ShowsAValidation) {
  ValidationMetrics metrics{.step = 10, .loss = 2.5, .tps = 999, .memory_gib = 1, .memory_percent = 10};
  EXPECT_EQ(console_line(metrics, false),
            "validate step: 10  loss:  2.5000  memory:  1.00GiB(10.00%)  tps: 999");
}

TEST(JsonLine, KeepsEveryBit) {
  auto object = nlohmann::json::parse(json_line(sample()));
  EXPECT_EQ(object["loss"].get<double>(), 1.0 / 3);
  EXPECT_EQ(object["n_tokens_seen"].get<int64_t>(), 9007199254740993);
  for (const char* key : {"step", "loss", "grad_norm", "lr", "tps", "tflops", "mfu", "memory_gib",
                          "data_loading_s", "step_s", "n_tokens_seen", "max_loss"})
    EXPECT_TRUE(object.contains(key)) << key;
  EXPECT_TRUE(object["mfu"].is_null());
  EXPECT_FALSE(object.contains("startup_s"));
}

TEST(JsonLine, HasDeviceFieldsOnlyOnADevice) {
  StepMetrics metrics = sample();
  EXPECT_EQ(nlohmann::json::parse(json_line(metrics))["memory_percent"], 2.25);
  EXPECT_FALSE(nlohmann::json::parse(json_line(metrics)).contains("active_gib"));
  metrics.allocated_gib = 1.125;
  metrics.active_gib = 1.25;
  metrics.active_percent = 1.5;
  metrics.alloc_retries = 3;
  metrics.num_ooms = 1;
  const auto object = nlohmann::json::parse(json_line(metrics));
  EXPECT_EQ(object["allocated_gib"], 1.125);
  EXPECT_EQ(object["active_gib"], 1.25);
  EXPECT_EQ(object["active_percent"], 1.5);
  EXPECT_EQ(object["alloc_retries"], 3);
  EXPECT_EQ(object["num_ooms"], 1);
  EXPECT_EQ(nlohmann::json::parse(json_line(ValidationMetrics{.memory_percent = 7}))["memory_percent"], 7);
}

TEST(JsonLine, HasTheShareOfThePlanOnlyWithAPlan) {
  StepMetrics metrics = sample();
  EXPECT_FALSE(nlohmann::json::parse(json_line(metrics)).contains("percent_of_plan"));
  metrics.percent_of_plan = 93.5;
  EXPECT_EQ(nlohmann::json::parse(json_line(metrics))["percent_of_plan"], 93.5);
}

TEST(JsonLine, WritesNullForALossThatIsNaN) {
  StepMetrics metrics = sample();
  metrics.loss = metrics.grad_norm = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(nlohmann::json::parse(json_line(metrics))["loss"].is_null());
}

TEST(TensorBoard, WritesNoTagForAnUnknownValue) {
  data::TemporaryFolder folder;
  const auto tags_of = [&](const char* run, const StepMetrics& metrics) {
    MetricsSettings settings;
    settings.enable_tensorboard = true;
    {
      MetricsLogger logger({.settings = settings, .folder = folder.path() / run});
      logger.logged(metrics);
      logger.validated({.step = 1});
      logger.flush();
    }
    std::string text;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path() / run / "tb"))
      if (entry.is_regular_file()) text += read_file(entry.path());
    return text;
  };
  StepMetrics metrics = sample();
  const std::string plain = tags_of("plain", metrics);
  for (const char* tag : {"memory/max_reserved(%)", "validation_metrics/memory/max_reserved(%)"})
    EXPECT_NE(plain.find(tag), std::string::npos) << tag;
  const auto known = {"mfu(%)",
                      "of_plan(%)",
                      "memory/max_allocated(GiB)",
                      "memory/max_active(GiB)",
                      "memory/max_active(%)",
                      "memory/num_alloc_retries",
                      "memory/num_ooms"};
  for (const char* tag : known) EXPECT_EQ(plain.find(tag), std::string::npos) << tag;
  metrics.mfu = metrics.percent_of_plan = 40;
  metrics.allocated_gib = metrics.active_gib = metrics.active_percent = 1;
  metrics.alloc_retries = metrics.num_ooms = 0;
  const std::string device = tags_of("device", metrics);
  for (const char* tag : known) EXPECT_NE(device.find(tag), std::string::npos) << tag;
}

TEST(TensorBoard, WritesEachStartToAFolderOfItsOwn) {
  data::TemporaryFolder folder;
  MetricsSettings settings;
  settings.enable_tensorboard = true;
  for (int start = 0; start < 3; ++start)
    MetricsLogger({.settings = settings, .folder = folder.path()}).logged(sample());
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path() / "tb"), {}), 3);
}

TEST(JsonLine, HasStartupTimeWhenSet) {
  StepMetrics metrics = sample();
  metrics.startup_s = 0.25;
  EXPECT_EQ(nlohmann::json::parse(json_line(metrics))["startup_s"].get<double>(), 0.25);
}

/// A user's sink.
class RecordingSink final : public MetricsSink {
 public:
  explicit RecordingSink(std::vector<std::string>& calls) : calls_(calls) {}
  void begin_after(int64_t step) override { calls_.push_back(str("begin after ", step)); }
  void log(const StepMetrics& metrics) override { calls_.push_back(str("step ", metrics.step)); }
  void log(const ValidationMetrics& metrics) override { calls_.push_back(str("validation ", metrics.step)); }
  void flush() override { calls_.push_back("flush"); }

 private:
  std::vector<std::string>& calls_;
};

TEST(MetricsSinks, ReceiveTheMetricsThatARunLogs) {
  data::TemporaryFolder folder;
  static std::vector<std::string> calls;
  metrics_sinks().add("recording",
                      [](const MetricsSinkOptions&) { return std::make_unique<RecordingSink>(calls); });
  MetricsSettings settings;
  settings.sinks = {"recording"};
  MetricsLogger logger({.settings = settings, .folder = folder.path()});
  logger.begin_after(6);
  logger.logged(sample());
  logger.validated({.step = 7});
  logger.flush();
  EXPECT_EQ(calls, (std::vector<std::string>{"begin after 6", "step 7", "validation 7", "flush"}));
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "metrics.jsonl")) << "jsonl isn't among the sinks";
}

TEST(MetricsSinks, RefuseAnUnknownName) {
  MetricsSettings settings;
  settings.sinks = {"jsonl", "consol"};
  try {
    MetricsLogger logger({.settings = settings});
    FAIL() << "expected a ConfigError";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("did you mean 'console'"), std::string::npos) << error.what();
  }
}

TEST(Progress, ShowsPercentAndTimeLeft) {
  EXPECT_EQ(progress(42, 100, 75.4), "   42% 0:01:15 left");
  EXPECT_EQ(progress(1, 300, 36061), "    0% 10:01:01 left");
  EXPECT_EQ(progress(300, 300, 0), "  100% 0:00:00 left");
}

TEST(Progress, IgnoresTheTimeOfTheFirstStep) {
  RemainingTime remaining(20);
  EXPECT_EQ(remaining.seconds_left(1, 100), std::nullopt);
  EXPECT_EQ(remaining.seconds_left(5, 108), 15 * 2.0);
  EXPECT_EQ(remaining.seconds_left(10, 127), 10 * 3.0);
  EXPECT_EQ(remaining.seconds_left(20, 200), 0);
}

}  // namespace
}  // namespace titan::train

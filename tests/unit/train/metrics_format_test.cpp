#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "titan/train/metrics.h"

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

TEST(ConsoleLine, HasTorchTitansFields) {
  EXPECT_EQ(console_line(sample(), false),
            "step:  7  loss:  0.33333  grad_norm: 12.3457  memory:  1.50GiB(2.25%)  tps: 1,234,567  "
            "tflops: 1,234.57  mfu: N/A");
}

TEST(ConsoleLine, ShowsMfuWhereThePeakIsKnown) {
  StepMetrics metrics = sample();
  metrics.mfu = 41.267;
  EXPECT_NE(console_line(metrics, false).find("mfu: 41.27%"), std::string::npos);
}

TEST(ConsoleLine, IsColoured) {
  std::string line = console_line(sample(), true);
  EXPECT_EQ(line.find("\033[31mstep:"), 0u);
  EXPECT_EQ(line.substr(line.size() - 5), "\033[39m");
}

TEST(ConsoleLine, OfValidation) {
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

TEST(JsonLine, HasStartupOnce) {
  StepMetrics metrics = sample();
  metrics.startup_s = 0.25;
  EXPECT_EQ(nlohmann::json::parse(json_line(metrics))["startup_s"].get<double>(), 0.25);
}

TEST(PeakFlops, TellsTheH100sApart) {
  EXPECT_EQ(peak_flops_of("NVIDIA H100 80GB HBM3"), 989e12);
  EXPECT_EQ(peak_flops_of("NVIDIA H100 PCIe"), 756e12);
  EXPECT_EQ(peak_flops_of("NVIDIA H100 NVL"), 835e12);
  EXPECT_EQ(peak_flops_of("NVIDIA H200"), 989e12);
  EXPECT_EQ(peak_flops_of("NVIDIA H20"), 148e12);
  EXPECT_EQ(peak_flops_of("NVIDIA GB200"), 2.5e15);
  EXPECT_EQ(peak_flops_of("NVIDIA B200"), 2.25e15);
  EXPECT_EQ(peak_flops_of("AMD Instinct MI300X"), 1300e12);
  EXPECT_FALSE(peak_flops_of("GeForce 256"));
}

TEST(Progress, IsPercentAndTime) {
  EXPECT_EQ(progress(42, 100, 75.4), "   42% 0:01:15 left");
  EXPECT_EQ(progress(1, 300, 36061), "    0% 10:01:01 left");
  EXPECT_EQ(progress(300, 300, 0), "  100% 0:00:00 left");
}

TEST(Progress, PaceIsThatOfTheStepsBehindTheFirst) {
  RemainingTime remaining(20);
  EXPECT_EQ(remaining.seconds_left(1, 100), std::nullopt);  // however long it took to come here
  EXPECT_EQ(remaining.seconds_left(5, 108), 15 * 2.0);
  EXPECT_EQ(remaining.seconds_left(10, 127), 10 * 3.0);
  EXPECT_EQ(remaining.seconds_left(20, 200), 0);
}

}  // namespace
}  // namespace titan::train

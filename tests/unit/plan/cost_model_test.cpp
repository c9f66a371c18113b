#include "plan/cost_model.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <numeric>

#include <gtest/gtest.h>

#include "plan/device_file.h"
#include "titan/core/error.h"

namespace titan::plan {
namespace {

std::vector<int> ranks(int count, int stride = 1) {
  std::vector<int> result(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) result[static_cast<size_t>(i)] = i * stride;
  return result;
}

TEST(CostModel, AProductAtAMeasuredPointReachesWhatWasMeasured) {
  ClusterSpec cluster = load_device("h100");
  cluster.device.power = 1;
  const CostModel costs(cluster, Kernels::Ours);
  for (const DeviceSpec::ProductPoint& point : cluster.device.efficiency)
    if (point.dtype == "bfloat16")
      EXPECT_NEAR(
          costs.share_of_product({.batches = 1, .m = point.m, .n = point.n, .k = point.k}, c10::kBFloat16),
          point.share, 1e-9);
}

TEST(CostModel, SmallAndThinProductsReachLess) {
  const CostModel costs(load_device("h100"), Kernels::Ours);
  const auto share = [&](int64_t m, int64_t n, int64_t k) {
    return costs.share_of_product({.batches = 1, .m = m, .n = n, .k = k}, c10::kBFloat16);
  };
  EXPECT_LT(share(256, 256, 8192), share(4096, 4096, 8192) / 4);
  EXPECT_LT(share(8192, 8192, 128), share(8192, 8192, 8192) / 2);
  EXPECT_LE(share(16384, 16384, 16384), 1);
}

TEST(CostModel, RingsGoBySlowestLink) {
  const ClusterSpec cluster = load_device("h100");
  const CostModel costs(cluster, Kernels::Ours);
  constexpr double bytes = 1e9;
  const auto within = costs.of("all_gather", bytes, ranks(8));
  EXPECT_FALSE(within.between_hosts);
  EXPECT_NEAR(within.seconds, bytes * 7 / 8 / (0.8 * 450e9), 0.1e-3);
  // Each of 8 ranks of a host brings a card, so its links are the slowest part; alone in its host, a rank has one card.
  const auto all = costs.of("all_gather", bytes, ranks(64)),
             one_each = costs.of("all_gather", bytes, ranks(8, 8));
  EXPECT_TRUE(all.between_hosts);
  EXPECT_NEAR(all.seconds, bytes * 63 / 64 / (0.8 * 450e9), 0.5e-3);
  EXPECT_NEAR(one_each.seconds, bytes * 7 / 8 / (0.94 * 50e9), 0.5e-3);
  EXPECT_GT(costs.of("all_reduce", bytes, ranks(64)).seconds, 1.5 * all.seconds);
}

// The formulas by hand, in microseconds and bytes per microsecond.
TEST(CostModel, SumsTakeTheFastestOfSwitchesRingsAndTrees) {
  const CostModel hopper(load_device("h100"), Kernels::Ours), ampere(load_device("a100"), Kernels::Ours);
  const auto us = [](const CostModel& costs, double bytes, const std::vector<int>& members) {
    return 1e6 * costs.of("all_reduce", bytes, members).seconds;
  };
  // NVLink's switches, which two ranks don't need and an A100 hasn't got.
  EXPECT_NEAR(us(hopper, 1e9, ranks(8)), 23 + 1e9 * 2 * 7 / 8 / (1.06 * 450e3), 1e-3);
  EXPECT_NEAR(us(hopper, 1e9, ranks(2)), 8.4 + 2 * 3.4 + 1e9 / (0.8 * 450e3), 1e-3);
  EXPECT_NEAR(us(ampere, 1e9, ranks(8)), 8.4 + 14 * 3.4 + 1e9 * 2 * 7 / 8 / (0.8 * 300e3), 1e-3);
  // Trees between 64 hosts with one card each: LL128 for a megabyte, LL for less. In a host, a chain.
  EXPECT_NEAR(us(hopper, 1e6, ranks(64, 8)), 14 + 2 * 6 * 8.5 + 2 * 1e6 / (0.92 * 120 / 128 * 0.94 * 50e3),
              1e-3);
  EXPECT_NEAR(us(hopper, 8, ranks(64, 8)), 6.8 + 2 * 6 * 5.0, 0.01);
  EXPECT_NEAR(us(ampere, 1e6, ranks(8)), 14 + 14 * 1.25 + 2 * 1e6 / (0.92 * 7 / 9 * 0.8 * 300e3), 1e-3);
}

TEST(CostModel, BroadcastsAndExchangesGoByTheirBytes) {
  const CostModel costs(load_device("h100"), Kernels::Ours);
  const auto us = [&](const char* op, const std::vector<int>& members) {
    return 1e6 * costs.of(op, 1e9, members).seconds;
  };
  EXPECT_NEAR(us("broadcast", ranks(8)), 8.4 + 7 * 3.4 + 1e9 / (0.8 * 450e3), 1e-3);
  EXPECT_NEAR(us("all_to_all", ranks(8)), 8.4 + 3.4 + 1e9 * 7 / 8 / (0.8 * 450e3), 1e-3);
  // Half of it leaves the host.
  EXPECT_NEAR(us("all_to_all", ranks(16)), 8.4 + 14 + 1e9 / 2 / (0.94 * 50e3), 1e-3);
}

TEST(CostModel, ACpusCollectivesTakeWhatWasMeasured) {
  ClusterSpec cluster = load_device("cpu");
  cluster.host = {.devices = 4, .gb_per_s = 10 / kHostLinkShare, .latency_us = 50};
  const CostModel costs(cluster, Kernels::Ours);
  EXPECT_NEAR(costs.of("all_gather", 0, ranks(4)).seconds, 3 * 50e-6, 1e-12);
  EXPECT_NEAR(costs.of("all_gather", 4e9, ranks(4)).seconds, 3 * 50e-6 + 3e9 / 10e9, 1e-9);
  EXPECT_NEAR(costs.of_message(1e9, 0, 1).seconds, 50e-6 + 1e9 / 10e9, 1e-9);
}

TEST(CostModel, ACpusLaunchesTakeTheHostsTimeAsOftenAsRanksShareACore) {
  ClusterSpec cluster = load_device("cpu");
  cluster.device.launch_us = 2;
  cluster.device.alone = 4;
  const CostModel costs(cluster, Kernels::Ours);
  EXPECT_NEAR(costs.of({}, "swiglu_kernel").seconds, 4 * 8 * 1e-6, 1e-12);
  cluster.device.launch_us = 10;
  EXPECT_NEAR(CostModel(cluster, Kernels::Ours).of({}, "swiglu_kernel").seconds, 4 * 10 * 1e-6, 1e-12);
  EXPECT_EQ(costs.host_seconds(), 0);
}

TEST(CostModel, CallsOfRanksThatShareCoresBeginLate) {
  ClusterSpec cluster = load_device("cpu");
  cluster.host.late_share = 0.5;
  cluster.host.late_us = 3000;
  const CostModel costs(cluster, Kernels::Ours);
  EXPECT_NEAR(costs.late_seconds(1e-3), 0.5e-3, 1e-12);
  EXPECT_NEAR(costs.late_seconds(1), 3e-3, 1e-12);
  EXPECT_EQ(CostModel(load_device("h100"), Kernels::Ours).late_seconds(1), 0);
}

TEST(CostModel, AttentionGoesByMeasuredSizesOfHeads) {
  ClusterSpec cluster = load_device("cpu");
  cluster.device.attention = {
      {.sequence = 256, .forward = 0.1, .backward = 0.1, .kernel = "", .features = 16},
      {.sequence = 256, .forward = 0.4, .backward = 0.4, .kernel = "", .features = 128}};
  const CostModel costs(cluster, Kernels::Ours);
  const auto seconds = [&](int64_t features, c10::ScalarType dtype = c10::kBFloat16) {
    return costs.of({.flops = 1e15, .dtype = dtype, .shape = {1, 256, 256, features}}, "aten::attention")
        .seconds;
  };
  EXPECT_NEAR(seconds(16) / seconds(128), 4, 1e-6);
  EXPECT_NEAR(seconds(64) / seconds(128), 0.4 / (0.1 + 0.3 * 2 / 3),
              1e-6);  // two of three powers of two above 16
  EXPECT_EQ(seconds(256), seconds(128));
  EXPECT_NEAR(seconds(8) / seconds(16), std::pow(2, 0.4), 1e-6);
  EXPECT_EQ(seconds(16, c10::kFloat), seconds(16));  // by the peak of what was measured
}

TEST(CostModel, SmallCollectivesTakeTheirHops) {
  const CostModel costs(load_device("h100"), Kernels::Ours);
  const double few = costs.of("all_gather", 8, ranks(8)).seconds,
               many = costs.of("all_gather", 8, ranks(512)).seconds;
  EXPECT_LT(few, 20e-6);
  EXPECT_GT(many, 10 * few);
  // A tree has fewer hops than a ring.
  EXPECT_LT(costs.of("all_reduce", 8, ranks(512)).seconds, many);
}

TEST(CostModel, OtherKernelsMoveMoreBytes) {
  const ClusterSpec cluster = load_device("h100");
  const Launch launch{.bytes_read = 1e9, .bytes_written = 1e9};
  const auto seconds = [&](Kernels kernels) {
    return CostModel(cluster, kernels).of(launch, "add_rms_norm_kernel").seconds;
  };
  EXPECT_LT(seconds(Kernels::Ours), seconds(Kernels::Compiled));
  EXPECT_LT(seconds(Kernels::Compiled), seconds(Kernels::Eager) / 3);
}

TEST(CostModel, PyTorchCopiesWhatItGathersAndReduces) {
  Trace trace;
  const auto seconds = [&](Kernels kernels, const char* op, const char* label, int num_tensors) {
    const Collective call{.op = trace.number_of(op),
                          .label = trace.number_of(label),
                          .bytes = 1'000'000'000,
                          .num_tensors = num_tensors};
    return CostModel(load_device("h100"), kernels).of_copies(trace, call).seconds;
  };
  EXPECT_EQ(seconds(Kernels::Ours, "all_gather", "fsdp::all_gather layers.0", 9), 0);
  const double of_bytes = seconds(Kernels::Eager, "all_gather", "fsdp::all_gather layers.0", 9);
  EXPECT_GT(of_bytes, 0.5e-3);
  EXPECT_LT(seconds(Kernels::Eager, "reduce_scatter", "fsdp::reduce_scatter layers.0", 9), of_bytes);
  for (const char* op : {"all_gather", "reduce_scatter"}) {
    EXPECT_EQ(seconds(Kernels::Compiled, op, "tp::forward", 8), of_bytes) << op;  // a batch of eight rows
    EXPECT_EQ(seconds(Kernels::Compiled, op, "tp::forward", 1), 0) << op;
  }
  EXPECT_EQ(seconds(Kernels::Eager, "all_reduce", "fsdp::all_reduce", 1), 0);
}

TEST(CostModel, ADtypeWithoutAPeakIsRefused) {
  const CostModel costs(load_device("a100"), Kernels::Ours);
  const Launch launch{.flops = 1e12, .dtype = c10::kFloat8_e4m3fn, .shape = {1, 128, 128, 128}};
  EXPECT_THROW(costs.of(launch, "aten::_scaled_mm"), ConfigError);
}

// ---- files

std::string problem_of(const std::string& text) {
  const auto file = std::filesystem::path(::testing::TempDir()) / "device.toml";
  std::ofstream(file) << text;
  try {
    load_device(file.string());
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(DeviceFile, EveryDeviceIsReadAndWrittenTheSame) {
  for (const char* name : {"a100", "h100", "h100_500w", "h200", "b200", "cpu"}) {
    const std::string text = to_toml(load_device(name));
    const auto file = std::filesystem::path(::testing::TempDir()) / "copy.toml";
    std::ofstream(file) << text;
    EXPECT_EQ(to_toml(load_device(file.string())), text) << name;
  }
}

TEST(DeviceFile, RanksThatShareCoresAreReadAndWritten) {
  ClusterSpec cluster = load_device("cpu");
  cluster.host.late_share = 0.25;
  cluster.host.late_us = 3000;
  const auto file = std::filesystem::path(::testing::TempDir()) / "late.toml";
  std::ofstream(file) << to_toml(cluster);
  const ClusterSpec read = load_device(file.string());
  EXPECT_EQ(read.host.late_share, 0.25);
  EXPECT_EQ(read.host.late_us, 3000);
  EXPECT_EQ(read.device.attention.front().features, cluster.device.attention.front().features);
  // A GPU has its cores to itself.
  std::string text = to_toml(load_device("h100"));
  text.insert(text.find("latency_us"), "late_share = 0.25\n");
  EXPECT_NE(problem_of(text).find("unknown key host.late_share"), std::string::npos) << problem_of(text);
}

TEST(DeviceFile, WhatIsWrongIsNamedWithItsLine) {
  const std::string good = to_toml(load_device("h100"));
  EXPECT_EQ(problem_of(good), "");
  const auto changed = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    text.replace(text.find(from), from.size(), to);
    return problem_of(text);
  };
  EXPECT_NE(changed("launch_us", "launch_ms")
                .find("device.toml:7:1: unknown key device.launch_ms; did you mean 'device.launch_us'"),
            std::string::npos)
      << changed("launch_us", "launch_ms");
  EXPECT_NE(changed("launch_us", "launch_ms").find("device.launch_us is missing"), std::string::npos);
  EXPECT_NE(changed("memory_gib = 79.18", "memory_gib = \"many\"").find("must be a number from 1 to 4096"),
            std::string::npos);
  EXPECT_NE(changed("share = 0.803", "share = 80.3").find("device.efficiency.share = 80.3 must be"),
            std::string::npos);
  EXPECT_NE(changed("\"cudnn\"", "\"cudn\"").find("one of cudnn, flash"), std::string::npos);
  EXPECT_NE(problem_of("[device").find("not TOML"), std::string::npos);
}

TEST(DeviceFile, NeedsNeitherComputeCapabilityNorMultiprocessors) {
  const auto file = std::filesystem::path(::testing::TempDir()) / "short.toml";
  std::ofstream(file) << R"([device]
name = "GPU"
memory_gib = 79.6
memory_gb_per_s = 3350
launch_us = 2
[device.tflops]
bfloat16 = 989
float8 = 1979
float32 = 67
[[device.efficiency]]
dtype = "bfloat16"
m = 4096
n = 4096
k = 4096
share = 0.7
[host]
devices = 8
gb_per_s = 450
latency_us = 5
[network]
gb_per_s = 50
latency_us = 15
)";
  const ClusterSpec cluster = load_device(file.string());
  EXPECT_EQ(cluster.assumed,
            (std::vector<std::string>{"device.compute_capability = 90", "device.multiprocessors = 132",
                                      "host.pcie_gb_per_s = 64",
                                      "device.attention: as fast as products of the same size"}));
  const DeviceSpec& device = cluster.device;
  EXPECT_EQ(device.compute_capability, 90);
  EXPECT_EQ(device.multiprocessors, 132);
  EXPECT_EQ(device.efficiency.size(), 1U);
}

TEST(DeviceFile, IsFoundByTheNameThatTheDriverGives) {
  EXPECT_EQ(device_called("NVIDIA H100 80GB HBM3"), "h100");
  EXPECT_EQ(device_called("NVIDIA H200"), "h200");
  EXPECT_EQ(device_called("NVIDIA H20"), std::nullopt);
}

}  // namespace
}  // namespace titan::plan

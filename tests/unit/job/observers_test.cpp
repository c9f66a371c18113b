#include "job/build.h"

#include <gtest/gtest.h>

#include "titan/float8/recipe.h"

namespace titan::train {
namespace {

// The known peaks are for bfloat16.
TEST(PeakFlops, IsUnknownForAJobInFloat8) {
  JobConfig config;
  EXPECT_EQ(job_peak_flops(config, "NVIDIA H200"), 989e12);
  config.model.converters = {float8::kConverter};
  EXPECT_FALSE(job_peak_flops(config, "NVIDIA H200"));
  config.metrics.peak_flops = 1979e12;
  EXPECT_EQ(job_peak_flops(config, "NVIDIA H200"), 1979e12);
}

TEST(PeakFlops, DistinguishesDevicesOfSimilarNames) {
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

TEST(DeviceLimits, AreThoseOfTheDataSheets) {
  JobConfig config;
  const DeviceLimits h100 = device_limits(config, "NVIDIA H100 80GB HBM3");
  EXPECT_EQ(h100.bytes_per_s, 3.35e12);
  EXPECT_EQ(h100.flops, (std::map<at::ScalarType, double>{{at::kBFloat16, 989e12},
                                                          {at::kHalf, 989e12},
                                                          {at::kFloat8_e4m3fn, 1979e12},
                                                          {at::kFloat8_e5m2, 1979e12},
                                                          {at::kFloat, 67e12}}));
  EXPECT_EQ(device_limits(config, "NVIDIA A100-SXM4-40GB").bytes_per_s, 1.555e12);
  EXPECT_EQ(device_limits(config, "NVIDIA A100-SXM4-80GB").bytes_per_s, 2.039e12);
  EXPECT_EQ(device_limits(config, "NVIDIA A100 80GB PCIe").bytes_per_s, 1.935e12);
  EXPECT_EQ(device_limits(config, "NVIDIA H200").bytes_per_s, 4.8e12);
  EXPECT_EQ(device_limits(config, "NVIDIA B200").bytes_per_s, 7.7e12);
  EXPECT_FALSE(device_limits(config, "NVIDIA A100-SXM4-80GB").flops.contains(at::kFloat8_e4m3fn));
}

TEST(DeviceLimits, HaveOnlyTheGivenPeakForAnUnknownDevice) {
  JobConfig config;
  EXPECT_TRUE(device_limits(config, "GeForce 256").flops.empty());
  config.metrics.peak_flops = 1e12;
  const DeviceLimits limits = device_limits(config, "GeForce 256");
  EXPECT_EQ(limits.flops.at(at::kBFloat16), 1e12);
  EXPECT_EQ(limits.bytes_per_s, 0);
}

}  // namespace
}  // namespace titan::train

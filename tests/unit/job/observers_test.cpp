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

}  // namespace
}  // namespace titan::train

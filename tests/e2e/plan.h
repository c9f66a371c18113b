#pragma once

// Plans a job with `titan plan`, as a user does.

#include <sys/resource.h>

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "e2e/training.h"

namespace titan::testing {

/// The plan of a config in configs/ for so many GPUs.
inline CommandResult plan(const std::string& config, int world_size, const Words& words = {},
                          double limit_s = 300) {
  const std::string file = std::string(TITAN_SOURCE_DIR) + "/configs/" + config + ".toml";
  return run(Words{titan_program(), "plan", file, "--world", std::to_string(world_size)} + words, {},
             limit_s);
}

inline nlohmann::json plan_json(const std::string& config, int world_size, Words words = {},
                                double limit_s = 300) {
  const CommandResult result = plan(config, world_size, Words{"--json"} + words, limit_s);
  EXPECT_EQ(result.status, 0) << result.err;
  return result.status == 0 ? nlohmann::json::parse(result.out) : nlohmann::json();
}

/// The costs of the children that have ended so far.
struct Usage {
  double cpu_s = 0;    // the sum
  double peak_gb = 0;  // the largest's
};
inline Usage usage_of_children() {
  rusage usage{};
  ::getrusage(RUSAGE_CHILDREN, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return {seconds(usage.ru_utime) + seconds(usage.ru_stime),
          static_cast<double>(usage.ru_maxrss) * 1024 / 1e9};
}

/// Parts of a device's file, between which its name and memory go.
constexpr const char* kDevice = "[device]\nmemory_gb_per_s = 3000\nlaunch_us = 1\n";
constexpr const char* kLinks =
    "[device.tflops]\nbfloat16 = 900\nfloat32 = 60\n[host]\ndevices = 8\ngb_per_s = 450\nlatency_us = 3\n"
    "[network]\ngb_per_s = 50\nlatency_us = 14\n";

}  // namespace titan::testing

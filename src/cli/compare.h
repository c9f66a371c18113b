#pragma once

// Comparing runs: settings that differ, and where their losses part.

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "cli/run/run_folder.h"

namespace titan::cli {

/// Throws ConfigError when the folder holds no run, Error for a line of its metrics that isn't a step's.
RunFolder read_compared_run(const std::filesystem::path& folder);

/// The names of all settings but `job.dump_folder`, which always differs.
std::set<std::string> keys_of(const std::vector<RunFolder>& runs);
bool same_setting(const std::vector<RunFolder>& runs, const std::string& key);

/// Which losses are compared: &RunFolder::steps or &RunFolder::validations.
using Series = MetricRows RunFolder::*;
std::vector<int64_t> common_steps(const std::vector<RunFolder>& runs, Series series);

struct Parting {
  std::optional<int64_t> first_step;  ///< the first step whose losses aren't the same double
  double largest_difference = 0;
  int64_t largest_step = 0;
};
/// Over `steps`, which both must have.
Parting compare_losses(const MetricRows& a, const MetricRows& b, const std::vector<int64_t>& steps);

}  // namespace titan::cli

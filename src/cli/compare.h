#pragma once

// Compares runs: which settings differ, and from which step on their losses do.

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "cli/run/run_folder.h"

namespace titan::cli {

/// Throws ConfigError if the folder holds no run, and Error if a line of its metrics isn't a logged step.
RunFolder read_compared_run(const std::filesystem::path& folder);

/// The names of all settings but `job.dump_folder`, which always differs.
std::set<std::string> keys_of(const std::vector<RunFolder>& runs);
bool same_setting(const std::vector<RunFolder>& runs, const std::string& key);

/// Which losses are compared: &RunFolder::steps or &RunFolder::validations.
using Series = MetricRows RunFolder::*;
std::vector<int64_t> common_steps(const std::vector<RunFolder>& runs, Series series);

struct LossDifference {
  std::optional<int64_t> first_step;  ///< the first step whose losses aren't the same double
  double largest_difference = 0;
  int64_t largest_step = 0;
};
/// `steps`: steps that both runs have.
LossDifference compare_losses(const MetricRows& a, const MetricRows& b, const std::vector<int64_t>& steps);

}  // namespace titan::cli

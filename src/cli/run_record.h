#pragma once

// What a run left in its folder: config.toml and metrics.jsonl.

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace titan::cli {

struct LoggedStep {
  double loss = 0;
  double tps = 0;
  double step_s = 0;
};

struct RunRecord {
  std::filesystem::path folder;
  std::map<std::string, std::string> settings;  ///< full name -> value as TOML
  std::map<int64_t, LoggedStep> steps;

  std::string setting(const std::string& key) const;  ///< "unset" where the run has none
  /// Over the logged steps behind the first, which pays for set-up.
  double median_tps() const;
  double median_step_s() const;
};

/// Throws ConfigError when the folder holds no run, Error for a line of metrics.jsonl that isn't one. A last
/// line without its newline is left out: the run was killed while it wrote it.
RunRecord read_run(const std::filesystem::path& folder);

/// `job.dump_folder` isn't among them: it always differs.
std::set<std::string> keys_of(const std::vector<RunRecord>& runs);
bool same_setting(const std::vector<RunRecord>& runs, const std::string& key);
std::vector<int64_t> common_steps(const std::vector<RunRecord>& runs);

struct Parting {
  std::optional<int64_t> first_step;  ///< whose losses aren't the same double
  double largest_difference = 0;
  int64_t largest_step = 0;
};
Parting compare_losses(const RunRecord& a, const RunRecord& b, const std::vector<int64_t>& steps);

}  // namespace titan::cli

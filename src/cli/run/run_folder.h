#pragma once

// What a run left in its folder: config.toml, metrics.jsonl and, where it validated, validation.jsonl.

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace titan::cli {

/// Full name -> value as TOML, of a resolved config as runs write it.
std::map<std::string, std::string> settings_of(const std::string& toml);

/// A string of TOML as it is, without quotes and escapes; other values as they are written.
std::string text_of_toml(const std::string& value);

struct LoggedStep {
  double loss = 0;
  double tps = 0;
  double step_s = 0;  ///< NaN of a validation
};
using LoggedSteps = std::map<int64_t, LoggedStep>;

struct RunRecord {
  std::filesystem::path folder;
  std::map<std::string, std::string> settings;  ///< full name -> value as TOML
  LoggedSteps steps;
  LoggedSteps validations;  ///< by the training step they followed

  std::string setting(const std::string& key) const;  ///< "unset" where the run has none
  /// Over the logged steps behind the first, which pays for set-up.
  double median_tps() const;
  double median_step_s() const;
};

/// Throws ConfigError when the folder holds no run, Error for a line that isn't a step's. A last line without
/// its newline is left out: the run was killed while it wrote it.
RunRecord read_run(const std::filesystem::path& folder);

/// `job.dump_folder` isn't among them: it always differs.
std::set<std::string> keys_of(const std::vector<RunRecord>& runs);
bool same_setting(const std::vector<RunRecord>& runs, const std::string& key);

/// Of the losses in question: &RunRecord::steps or &RunRecord::validations.
using Series = LoggedSteps RunRecord::*;
std::vector<int64_t> common_steps(const std::vector<RunRecord>& runs, Series series);

struct Parting {
  std::optional<int64_t> first_step;  ///< whose losses aren't the same double
  double largest_difference = 0;
  int64_t largest_step = 0;
};
/// Over the steps in common.
Parting compare_losses(const LoggedSteps& a, const LoggedSteps& b, const std::vector<int64_t>& steps);

// The checkpoints of a run, as far as can be told without reading their tensors.

struct CheckpointRow {
  int64_t step = 0;
  int64_t num_bytes = 0;
  std::string written = {};  ///< local time
  std::string state = {};    ///< "complete", "model only", or what is wrong
  bool usable = true;
};

/// Ascending; none where the folder isn't there.
std::vector<CheckpointRow> list_checkpoints(const std::filesystem::path& folder);

/// The last of them; the others aren't looked into.
std::optional<CheckpointRow> newest_checkpoint(const std::filesystem::path& folder);

}  // namespace titan::cli

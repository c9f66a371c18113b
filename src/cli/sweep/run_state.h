#pragma once

// What a sweep remembers of a run, in its folder: sweep_run.json.

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace titan::cli::sweep {

struct RunState {
  std::string config;  ///< resolved, as TOML
  bool finished = false;
  int exit_code = 0;   ///< of the last attempt
  double seconds = 0;  ///< of all attempts
  int attempts = 0;
};

/// None: the sweep hasn't started this run. Throws Error for a file that isn't one of ours.
std::optional<RunState> read_run_state(const std::filesystem::path& folder);
void write_run_state(const std::filesystem::path& folder, const RunState& state);

/// Of a run that ended with exit code 0: it did all its steps, or all that its data gave, and wasn't told to
/// stop before.
bool went_through(const std::filesystem::path& folder);

/// Settings of this run that the one in its folder doesn't share, "training.seq_len: 16 | 24" each; none
/// where the folder holds no run.
std::vector<std::string> differences_to_folder(const std::filesystem::path& folder,
                                               const std::string& config);

}  // namespace titan::cli::sweep

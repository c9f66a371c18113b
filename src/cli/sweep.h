#pragma once

// A sweep: a file that describes runs, whose state is in their folders (sweep_run.json). The file:
//
//   base = "../llama3_debug.toml"   # config of all runs, relative to this file
//   folder = "outputs/sweep"        # one folder per run in here; default: outputs/<this file's name>
//   nproc = 2                       # ranks of each run; default 1
//
//   [set]                           # settings of all runs
//   training.steps = 100
//
//   [grid]                          # every combination
//   optimizer.lr = [1e-3, 3e-4]
//   training.seq_len = [128, 256]
//
//   [run.plain]                     # instead or in addition: named runs; each runs at every grid point
//   optimizer.weight_decay = 0.0

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace titan::cli::sweep {

/// Full name -> value, as the command line takes it.
using Setting = std::pair<std::string, std::string>;

struct Run {
  std::string name;  ///< its folder's name: "plain,lr=0.001,seq_len=128"
  std::vector<Setting> settings;
};

struct Plan {
  std::filesystem::path base;  ///< empty: defaults
  std::filesystem::path folder;
  int num_ranks = 1;
  std::vector<Run> runs;

  std::filesystem::path folder_of(const Run& run) const { return folder / run.name; }
  /// The settings of this run as arguments of `titan train`.
  std::vector<std::string> setting_words(const Run& run) const;
};

/// Throws ConfigError with all problems of the file itself. check_runs() checks the settings.
Plan read_plan(const std::filesystem::path& file);

/// Checks every run as `titan train` does: throws one ConfigError with each problem and the runs that have
/// it. Returns the resolved config of each run, as TOML. `only`: checks the existence of files for this run
/// only, as a task of a job array does.
std::vector<std::string> check_runs(const Plan& plan, std::optional<size_t> only = {});

/// Whether a run that ended with exit code 0 is finished: its own log says so, or its checkpoints hold its
/// last step, after which `titan train` has nothing left to do. `stop_requested`: this process passed a
/// signal on to it; this decides for a run that keeps neither logs nor checkpoints.
bool is_finished(const std::filesystem::path& folder, bool stop_requested);

}  // namespace titan::cli::sweep

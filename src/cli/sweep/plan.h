#pragma once

// What a sweep's file asks for:
//
//   base = "../llama3_debug.toml"   # config of all runs, from this file's folder
//   folder = "outputs/sweep"        # where the runs go, a folder each; default: outputs/<this file's name>
//   nproc = 2                       # ranks of a run; default 1
//
//   [set]                           # settings of all runs
//   training.steps = 100
//
//   [grid]                          # every combination of these
//   optimizer.lr = [1e-3, 3e-4]
//   training.seq_len = [128, 256]
//
//   [run.plain]                     # and, or instead, runs by name; with a grid, each at all of its points
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
  std::string name;  ///< of its folder: "plain,lr=0.001,seq_len=128"
  std::vector<Setting> settings;
};

struct Plan {
  std::filesystem::path base;  ///< empty: defaults
  std::filesystem::path folder;
  int num_ranks = 1;
  std::vector<Run> runs;

  std::filesystem::path folder_of(const Run& run) const { return folder / run.name; }
  /// Words behind `titan train` that make this run, without --nproc.
  std::vector<std::string> train_words(const Run& run) const;
};

/// Throws ConfigError with all that is wrong with the file itself. Whether there are such settings is
/// check_runs's.
Plan read_plan(const std::filesystem::path& file);

/// Every run as `titan train` would check it: throws one ConfigError with each problem and the runs that have
/// it. Returns the resolved configs, as TOML, by run. `only`: the one whose files are looked at, as a task of
/// an array does; else those of all.
std::vector<std::string> check_runs(const Plan& plan, std::optional<size_t> only = {});

}  // namespace titan::cli::sweep

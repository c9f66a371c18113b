#pragma once

// The command lines of titan's commands, parsed by CLI11. The settings of `titan train` (--section.key) are
// read by config::load, by their descriptions.

#include <chrono>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "cli/launch/launch.h"
#include "titan/parallel/pipeline_simulation.h"

namespace CLI {
class App;
}

namespace titan::cli {

/// The options that `titan launch` and `titan train --nproc` share, about lost ranks.
struct RestartWords {
  int max_restarts = 0;
  int min_ranks = 0;
  std::optional<std::chrono::milliseconds> rejoin_after = RestartOptions().rejoin_after;
  std::optional<std::chrono::milliseconds> stop_grace = {};  ///< unset: not given
  std::chrono::milliseconds longest_delay = RestartOptions().longest_delay;

  void apply(LaunchOptions& options) const;
  /// Throws ConfigError for --min-ranks without --max-restarts.
  void check_unused(const char* command) const;
};

/// Adds --max-restarts, --min-ranks, --rejoin-after, --longest-delay and --grace (`default_grace` describes its
/// default). `words` must outlive `app`.
void add_restart_options(CLI::App& app, RestartWords& words, const char* default_grace);

/// Adds --final-codes of `titan launch`. `codes` must outlive `app`.
void add_final_codes(CLI::App& app, std::optional<std::set<int>>& codes);

// Each parse function throws ConfigError for an unknown word or an invalid value. `help` is the help text when
// the words ask for it; then print it and do nothing else.

/// `titan train [CONFIG] [--nproc N] [--log-rank RANKS] [--max-restarts K ...] [--print-config]
/// [--print-plan] [--section.key value ...]`, in any order, except that CONFIG comes before the first setting.
struct TrainArguments {
  std::string help;
  std::filesystem::path config;
  int num_ranks = 0;  ///< 0: --nproc wasn't given
  std::string log_rank = "0";
  RestartWords restarts;
  bool print_config = false;
  bool print_plan = false;
  std::vector<std::string> overrides;  ///< the settings, for config::load
};
TrainArguments parse_train_arguments(const std::vector<std::string>& words);

/// `titan launch -n N [--log-rank RANKS] [--max-restarts K ...] [--] program [arguments ...]`: everything after
/// the program's name belongs to the program.
struct LaunchArguments {
  std::string help;
  LaunchOptions options;
};
LaunchArguments parse_launch_arguments(const std::vector<std::string>& words);

/// `titan compare RUN RUN ...`
struct CompareArguments {
  std::string help;
  std::vector<std::string> runs;
};
CompareArguments parse_compare_arguments(const std::vector<std::string>& words);

/// `titan docs PAGE`
struct DocsArguments {
  std::string help;
  std::string page;  ///< "config" or "torchtitan-keys"
};
DocsArguments parse_docs_arguments(const std::vector<std::string>& words);

/// `titan schedule --pp N --microbatches N [--schedule NAME] ...` or `titan schedule --from-csv FILE ...`
struct ScheduleArguments {
  std::string help;
  std::string schedule = "1F1B";
  int num_ranks = 4;
  int num_stages = 0;  ///< 0: the fewest that the schedule allows
  int num_micro_batches = 8;
  int times = 1;
  bool list = false;
  bool forward_only = false;
  bool complete = false;
  pipeline::Costs costs;
  int max_live = 0;  ///< 0: no limit
  bool no_svg = false;
  std::filesystem::path from_csv, csv;  ///< empty: none
  std::filesystem::path svg;            ///< empty: schedule.svg in the current folder, if possible
};
ScheduleArguments parse_schedule_arguments(const std::vector<std::string>& words);

}  // namespace titan::cli

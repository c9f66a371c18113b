#pragma once

// The command lines of titan's commands, parsed by CLI11. config::load reads the settings of `titan train`
// (--section.key) by their descriptions.

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/launch/launch.h"
#include "titan/parallel/pipeline_schedule.h"

namespace titan::cli {

// Each parse function throws ConfigError for an unknown word or an invalid value, and HelpText when the words
// ask for help.

/// `titan train [CONFIG] [--nproc N] [--log-rank RANKS] [--max-restarts K ...] [--print-config]
/// [--print-plan] [--section.key value ...]`, in any order, except that CONFIG comes before the first setting.
struct TrainArguments {
  std::filesystem::path config;
  int num_ranks = 0;  ///< 0: --nproc wasn't given
  std::string log_rank = "0";
  RestartOptions restarts;
  std::optional<std::chrono::milliseconds> stop_grace;  ///< unset: --grace wasn't given
  bool print_config = false;
  bool print_plan = false;
  std::vector<std::string> overrides;  ///< the settings, for config::load
};
TrainArguments parse_train_arguments(const Arguments& words);

/// `titan launch -n N [--log-rank RANKS] [--max-restarts K ...] [--] program [arguments ...]`: everything after
/// the program's name belongs to the program.
LaunchOptions parse_launch_arguments(const Arguments& words);

/// `titan compare RUN RUN ...`: the runs.
Arguments parse_compare_arguments(const Arguments& words);

/// `titan docs PAGE`: "config" or "torchtitan-keys".
std::string parse_docs_arguments(const Arguments& words);

/// `titan schedule --pp N --microbatches N [--schedule NAME] ...` or `titan schedule --from-csv FILE ...`
struct ScheduleArguments {
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
ScheduleArguments parse_schedule_arguments(const Arguments& words);

}  // namespace titan::cli

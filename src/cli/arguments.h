#pragma once

// The words of each command's line, read by CLI11. The settings of `titan train` (--section.key) are another
// matter: config::load reads them by their description.

#include <filesystem>
#include <string>
#include <vector>

#include "cli/launch_arguments.h"
#include "titan/cli/launch.h"
#include "titan/parallel/pipeline_simulation.h"

namespace titan::cli {

// Each parse function throws ConfigError for a word that it doesn't know or a value that it can't take.
// `help` is the text to print where the words ask for it; nothing else is to be done then.

/// `titan train [CONFIG] [--nproc N] [--log-rank RANKS] [--max-restarts K ...] [--print-config]
/// [--print-plan] [--section.key value ...]`, in any order but for CONFIG, which stands before the first
/// setting.
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

/// `titan launch -n N [--log-rank RANKS] [--max-restarts K ...] [--] program [arguments ...]`: what follows
/// the program's name is the program's.
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
  int num_stages = 0;  ///< 0: as many as the schedule wants at least
  int num_micro_batches = 8;
  int times = 1;
  bool list = false;
  bool forward_only = false;
  bool complete = false;
  pipeline::Costs costs;
  int max_live = 0;  ///< 0: no limit
  bool no_svg = false;
  std::filesystem::path from_csv, csv;  ///< empty: none
  std::filesystem::path svg;            ///< empty: schedule.svg in the current folder, if it can be written
};
ScheduleArguments parse_schedule_arguments(const std::vector<std::string>& words);

}  // namespace titan::cli

#include "cli/arguments.h"

#include <cmath>

#include <CLI/CLI.hpp>

#include "cli/parser.h"
#include "titan/config/load.h"
#include "titan/core/error.h"

namespace titan::cli {
namespace {

using std::chrono::milliseconds;

constexpr double kLongestSeconds = 1e6;

milliseconds read_seconds(const std::string& option, const std::string& text, const char* allowed) {
  double seconds = 0;
  if (!CLI::detail::lexical_cast(text, seconds) || !(seconds >= 0 && seconds <= kLongestSeconds))
    throw CLI::ValidationError(option, str("'", text, "' isn't ", allowed));
  return milliseconds(std::llround(seconds * 1000));
}

std::set<int> read_codes(const std::string& option, const std::string& text) {
  std::set<int> codes;
  for (const std::string& word : CLI::detail::split(text, ',')) {
    int code = 0;
    if (!CLI::detail::lexical_cast(word, code) || code < 1 || code > 255)
      throw CLI::ValidationError(
          option, str("'", text, "' isn't a comma-separated list of exit codes from 1 to 255, or 'none'"));
    codes.insert(code);
  }
  return codes;
}

}  // namespace

void add_restart_options(CLI::App& app, RestartWords& words, const char* default_grace) {
  app.add_option("--max-restarts", words.max_restarts,
                 "restart the ranks when one is lost, at most K times (default 0)")
      ->type_name("K")
      ->check(CLI::Range(0, 1'000'000).description(""));
  app.add_option("--min-ranks", words.min_ranks,
                 "with --max-restarts: continue without lost ranks while at least M are left (default: N, "
                 "all are restarted at once)")
      ->type_name("M")
      ->check(CLI::Range(1, 65536).description(""));
  app.add_option_function<std::string>(
         "--rejoin-after",
         [&words](const std::string& text) {
           words.rejoin_after.reset();
           if (text != "never")
             words.rejoin_after = read_seconds("--rejoin-after", text, "a number of seconds or 'never'");
         },
         "with --min-ranks: seconds until a lost rank's place is used again, or never (default 60); SIGUSR2 "
         "brings all back at once")
      ->type_name("S");
  app.add_option_function<std::string>(
         "--longest-delay",
         [&words](const std::string& text) {
           words.longest_delay = read_seconds("--longest-delay", text, "a number of seconds");
         },
         "with --max-restarts: the longest wait before a restart, in seconds; waits grow while groups fail "
         "early "
         "(default 60)")
      ->type_name("S");
  app.add_option_function<std::string>(
         "--grace",
         [&words](const std::string& text) {
           words.stop_grace = read_seconds("--grace", text, "a number of seconds");
         },
         str("seconds that ranks get for a last checkpoint when they are asked to end (default: ",
             default_grace, ")"))
      ->type_name("S");
}

void add_final_codes(CLI::App& app, std::optional<std::set<int>>& codes) {
  app.add_option_function<std::string>(
         "--final-codes",
         [&codes](const std::string& text) {
           codes = text == "none" ? std::set<int>() : read_codes("--final-codes", text);
         },
         "with --max-restarts: exit codes that are never retried, or none (default 2,3: refused settings, "
         "and a "
         "run that found wrong numbers)")
      ->type_name("C[,C...]");
}

void RestartWords::apply(LaunchOptions& options) const {
  options.restarts.max_restarts = max_restarts;
  options.restarts.min_ranks = min_ranks;
  options.restarts.rejoin_after = rejoin_after;
  options.restarts.longest_delay = longest_delay;
  if (stop_grace) options.stop_grace = *stop_grace;
}

void RestartWords::check_unused(const char* command) const {
  if (min_ranks > 0) throw ConfigError(str(command, ": --min-ranks needs --max-restarts"));
}

namespace {

constexpr int kMostRanks = 65536;
constexpr int kMostMicroBatches = 1 << 20;

CLI::Option* add_ranks(CLI::App& app, int& num_ranks) {
  return app.add_option("-n,--nproc", num_ranks, "start N ranks on this machine")
      ->type_name("N")
      ->check(CLI::Range(1, kMostRanks).description(""));
}

void add_log_rank(CLI::App& app, std::string& log_rank) {
  app.add_option("--log-rank", log_rank,
                 "ranks whose output is shown: 0 (default), a list such as 0,3, all, none")
      ->type_name("RANKS");
}

bool is_setting(const std::string& word) {
  return word.starts_with("--") && word.substr(0, word.find('=')).find('.') != std::string::npos;
}

void take_config(const Parser& parser, TrainArguments& arguments, const std::string& word) {
  if (!arguments.config.empty())
    parser.refuse(
        str("only one config file is allowed, not both ", arguments.config.string(), " and ", word));
  arguments.config = word;
}

/// A word before the first setting is the config file; the words after it are settings and their values.
void sort_words(const Parser& parser, TrainArguments& arguments, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    if (is_setting(word)) {
      arguments.overrides.push_back(word);
    } else if (word.starts_with("--") || (word.starts_with("-") && arguments.overrides.empty())) {
      parser.refuse_option(word);
    } else if (!arguments.overrides.empty()) {
      arguments.overrides.push_back(word);
    } else {
      take_config(parser, arguments, word);
    }
  }
}

/// `--section.key -n5`: a value, or an option after a switch? CLI11 would silently take it as an option.
void check_short_options(const Parser& parser, const std::vector<std::string>& words) {
  for (size_t i = 1; i < words.size(); ++i) {
    const std::string &setting = words[i - 1], &word = words[i];
    const bool open = is_setting(setting) && setting.find('=') == std::string::npos;
    if (open && (word.starts_with("-n") || (word.starts_with("-h") && word != "-h")))
      parser.refuse(str("is '", word, "' the value of ", setting, " or an option? Write ", setting, "=", word,
                        " for the value; put options before the first setting"));
  }
}

constexpr const char* kTrainNotes =
    "CONFIG is a TOML or JSON file. Without it, defaults and the given settings apply. Put it before the "
    "first\n"
    "setting: after a setting it would be read as the setting's value.\n"
    "\n"
    "Precedence: command line, CONFIG, the files that it includes, the defaults in brackets.\n"
    "Switches are --section.key and --section.no_key. Lists are a,b. \"none\" unsets an optional setting.\n"
    "Write a value that looks like an option as --section.key=value.\n";

constexpr const char* kLaunchNotes =
    "Starts N ranks of a program on this machine and waits for them. They find each other by dist::init().\n"
    "When a rank fails, the others are ended, its last lines are printed, and its exit code becomes this "
    "command's.\n"
    "With --max-restarts the ranks are restarted, unless the exit code is a final one. SIGTERM, SIGINT and "
    "SIGUSR1\n"
    "go to all ranks and end the job; SIGUSR2 brings lost ranks back; SIGQUIT goes to all ranks that handle "
    "it, and\n"
    "the job continues. See docs/elastic.md.\n";

constexpr const char* kCompareNotes =
    "RUN is a run's job.dump_folder. Prints the settings that differ, loss and tokens/s of the logged steps "
    "and\n"
    "validations side by side, and the first step at which a loss differs from the first run's.\n";

constexpr const char* kScheduleNotes =
    "Prints what each pipeline rank does over time, the duration of the step, the bubble (the share of time "
    "that\n"
    "ranks wait), the live activations of each rank (one per stage and micro-batch; from F to the end of B "
    "or W,\n"
    "from F to the end of B or I, from I to W) and the critical path.\n"
    "\n"
    "2F5 is stage 2's forward of micro-batch 5; B the backward, or I (input gradients) and W (weight\n"
    "gradients). Costs are in any unit; B costs I + W. A list of costs has one value per stage. Schedules:\n"
    "GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV.\n"
    "CSV files are TorchTitan's: a row per rank, a cell per action.\n";

void add_count(CLI::App& app, const std::string& name, int& count, int most, const std::string& text) {
  app.add_option(name, count, text)->type_name("N")->check(CLI::Range(1, most).description(""));
}

void add_file(CLI::App& app, const std::string& name, std::filesystem::path& file, const std::string& text) {
  app.add_option(name, file, text)->type_name("FILE");
}

void add_costs(CLI::App& app, pipeline::Costs& costs) {
  const auto per_stage = [&app](const char* name, std::vector<double>& values, const char* text) {
    app.add_option(name, values, text)
        ->type_name("T[,T...]")
        ->delimiter(',')
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
        ->allow_extra_args(false);
  };
  per_stage("--forward", costs.forward, "time of an F (default 1)");
  per_stage("--input", costs.input, "time of an I (default 1)");
  per_stage("--weight", costs.weight, "time of a W (default 1)");
  app.add_option("--communication", costs.communication, "time of a message between ranks (default 0)")
      ->type_name("T");
  app.add_option("--loss", costs.loss, "time of the loss, added to the last stage's F (default 0)")
      ->type_name("T");
}

}  // namespace

TrainArguments parse_train_arguments(const std::vector<std::string>& words) {
  TrainArguments arguments;
  Parser parser("titan train", "titan train [CONFIG] [options] [--section.key value ...]", kTrainNotes);
  add_ranks(parser.app, arguments.num_ranks);
  add_log_rank(parser.app, arguments.log_rank);
  add_restart_options(parser.app, arguments.restarts, "the limits for a step and a save");
  parser.app.add_flag("--print-config", arguments.print_config,
                      "print the resolved config as TOML, and stop");
  parser.app.add_flag(
      "--print-plan", arguments.print_plan,
      "print what tensor parallelism does to each module and how many bytes it moves per step, and "
      "stop; for N ranks, or the product of the degrees; starts none of them");
  parser.app.allow_extras();
  check_short_options(parser, words);
  arguments.help = parser.parse(words);
  if (!arguments.help.empty()) return arguments;
  sort_words(parser, arguments, parser.app.remaining());
  const auto named = config::override_value(arguments.overrides, "job.config_file");
  if (named && *named != "none") take_config(parser, arguments, *named);
  return arguments;
}

LaunchArguments parse_launch_arguments(const std::vector<std::string>& words) {
  LaunchArguments arguments;
  LaunchOptions& options = arguments.options;
  RestartWords restarts;
  std::optional<std::set<int>> final_codes;
  int unit = 1;
  Parser parser("titan launch", "titan launch -n N [options] [--] program [arguments ...]", kLaunchNotes);
  add_ranks(parser.app, options.num_ranks)->required();
  add_log_rank(parser.app, options.log_rank);
  add_restart_options(parser.app, restarts, "30");
  add_count(parser.app, "--multiple-of", unit, kMostRanks,
            "smaller groups have a multiple of U ranks: the product of a mesh's fixed degrees (default 1)");
  add_final_codes(parser.app, final_codes);
  parser.app.prefix_command();
  arguments.help = parser.parse(words);
  if (!arguments.help.empty()) return arguments;
  options.command = parser.app.remaining();
  if (!options.command.empty() && options.command.front() == "--") {
    options.command.erase(options.command.begin());
  } else if (!options.command.empty() && options.command.front().starts_with("-")) {
    parser.refuse_option(options.command.front());
  }
  if (options.command.empty()) parser.refuse("the program to start is missing");
  if (restarts.max_restarts == 0) restarts.check_unused("titan launch");
  restarts.apply(options);
  if (final_codes) options.restarts.final_codes = *final_codes;
  options.restarts.fits = [unit](int size) { return size % unit == 0; };
  return arguments;
}

CompareArguments parse_compare_arguments(const std::vector<std::string>& words) {
  CompareArguments arguments;
  Parser parser("titan compare", "titan compare RUN RUN ...", kCompareNotes);
  parser.app.allow_extras();
  arguments.help = parser.parse(words);
  if (!arguments.help.empty()) return arguments;
  for (const std::string& word : parser.app.remaining())
    if (word.starts_with("-")) parser.refuse_option(word);
  arguments.runs = parser.app.remaining();
  if (arguments.runs.size() < 2) parser.refuse("needs at least two runs");
  return arguments;
}

DocsArguments parse_docs_arguments(const std::vector<std::string>& words) {
  DocsArguments arguments;
  Parser parser("titan docs", "titan docs config|torchtitan-keys",
                "Prints a generated page of docs/, for scripts/update_docs.sh.\n");
  parser.app.add_option("PAGE", arguments.page, "which page")
      ->required()
      ->check(CLI::IsMember({"config", "torchtitan-keys"}));
  arguments.help = parser.parse(words);
  return arguments;
}

ScheduleArguments parse_schedule_arguments(const std::vector<std::string>& words) {
  ScheduleArguments arguments;
  Parser parser("titan schedule", "titan schedule [--schedule NAME] [--pp N] [--microbatches N] [options]",
                kScheduleNotes);
  CLI::App& app = parser.app;
  app.add_option("--schedule", arguments.schedule,
                 "the schedule's name, in upper or lower case (default 1F1B)")
      ->type_name("NAME");
  add_count(app, "--pp", arguments.num_ranks, kMostRanks, "pipeline ranks (default 4)");
  add_count(app, "--microbatches", arguments.num_micro_batches, kMostMicroBatches,
            "micro-batches of a step (default 8)");
  add_count(app, "--stages", arguments.num_stages, kMostRanks,
            "total number of stages (default: one per rank, or two if the schedule needs several)");
  add_count(app, "--times", arguments.times, kMostMicroBatches,
            "repeat the schedule N times, as in gradient accumulation");
  app.add_flag("--forward-only", arguments.forward_only,
               "only the forwards, as in validation, on the schedule's stages");
  app.add_flag("--complete", arguments.complete, "add sends, receives and parameter actions, as a run does");
  app.add_flag("--list", arguments.list,
               "print a table of all schedules for --pp and --microbatches, and stop");
  add_costs(app, arguments.costs);
  add_file(app, "--from-csv", arguments.from_csv, "read the schedule and its counts from a file");
  add_file(app, "--csv", arguments.csv, "write the schedule to a file");
  add_file(app, "--svg", arguments.svg, "draw the timeline to this file (default schedule.svg)");
  app.add_flag("--no-svg", arguments.no_svg, "draw no timeline")->excludes("--svg");
  add_count(app, "--max-live", arguments.max_live, kMostMicroBatches,
            "refuse a schedule in which a rank holds more live activations, counted per stage");
  for (const char* name : {"--forward-only", "--list"})
    app.get_option("--max-live")->excludes(app.get_option(name));
  for (const char* name : {"--schedule", "--pp", "--microbatches", "--stages", "--forward-only", "--list"})
    app.get_option("--from-csv")->excludes(app.get_option(name));
  arguments.help = parser.parse(words);
  return arguments;
}

}  // namespace titan::cli

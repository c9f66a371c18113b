// The command lines of titan's commands, parsed by CLI11, and those of `titan train` and `titan launch`,
// which share options.

#include <unistd.h>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "cli/parser.h"
#include "cli/train.h"
#include "titan/config/load.h"
#include "titan/core/error.h"

namespace titan::cli {
namespace {

/// CLI11's help, with a usage line that is more specific than "[OPTIONS]".
class Format : public CLI::Formatter {
 public:
  explicit Format(std::string usage) : usage_(std::move(usage)) { column_width(22); }
  std::string make_usage(const CLI::App*, std::string) const override { return "usage: " + usage_ + "\n"; }
  /// Only the value's name: the descriptions say which options exclude each other.
  std::string make_option_opts(const CLI::Option* option) const override {
    const std::string value = option->get_type_name();
    return (value.empty() ? "" : " " + value) + (option->get_required() ? " REQUIRED" : "");
  }

 private:
  std::string usage_;
};

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
  if (text == "none") return codes;
  for (const std::string& word : CLI::detail::split(text, ',')) {
    int code = 0;
    if (!CLI::detail::lexical_cast(word, code) || code < 1 || code > 255)
      throw CLI::ValidationError(
          option, str("'", text, "' isn't a comma-separated list of exit codes from 1 to 255, or 'none'"));
    codes.insert(code);
  }
  return codes;
}

/// Adds an option whose value `take` reads.
void add_read(Parser& parser, const std::string& name, const char* type, const std::string& text,
              const std::function<void(const std::string&)>& take) {
  parser.app.add_option_function<std::string>(name, take, text)->type_name(type);
}

/// Adds --max-restarts, --min-ranks, --rejoin-after, --longest-delay and --grace. `default_grace` describes
/// the default of --grace, whose value becomes `grace`.
template <class Grace>
void add_restart_options(Parser& parser, RestartOptions& restarts, const char* default_grace, Grace& grace) {
  parser.number("--max-restarts", restarts.max_restarts, CLI::Range(0, 1'000'000),
                "restart the ranks when one is lost, at most K times (default 0)", "K");
  parser.number("--min-ranks", restarts.min_ranks, CLI::Range(1, kMostRanks),
                "with --max-restarts: continue without lost ranks while at least M are left (default: N, all "
                "are restarted at once)",
                "M");
  add_read(
      parser, "--rejoin-after", "S",
      "with --min-ranks: seconds until a lost rank's place is used again, or never (default 60); SIGUSR2 "
      "brings all back at once",
      [&restarts](const std::string& text) {
        restarts.rejoin_after.reset();
        if (text != "never")
          restarts.rejoin_after = read_seconds("--rejoin-after", text, "a number of seconds or 'never'");
      });
  add_read(parser, "--longest-delay", "S",
           "with --max-restarts: the longest wait before a restart, in seconds; waits grow while groups fail "
           "early (default 60)",
           [&restarts](const std::string& text) {
             restarts.longest_delay = read_seconds("--longest-delay", text, "a number of seconds");
           });
  add_read(
      parser, "--grace", "S",
      str("seconds that ranks get for a last checkpoint when they are asked to end (default: ", default_grace,
          ")"),
      [&grace](const std::string& text) { grace = read_seconds("--grace", text, "a number of seconds"); });
}

void check_restarts(const Parser& parser, const RestartOptions& restarts) {
  if (restarts.max_restarts == 0 && restarts.min_ranks > 0) parser.refuse("--min-ranks needs --max-restarts");
}

CLI::Option* add_ranks(Parser& parser, int& num_ranks) {
  return parser.number("-n,--nproc", num_ranks, CLI::Range(1, kMostRanks), "start N ranks on this machine");
}

void add_log_rank(Parser& parser, std::string& log_rank) {
  parser.value("--log-rank", log_rank, "RANKS",
               "ranks whose output is shown: 0 (default), a list such as 0,3, all, none");
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
void sort_words(const Parser& parser, TrainArguments& arguments, const Arguments& words) {
  for (const std::string& word : words) {
    if (is_setting(word)) {
      arguments.overrides.push_back(word);
    } else if (word == "--module" || word == "--config" ||
               (arguments.overrides.empty() && word.ends_with(".py"))) {
      parser.refuse(str("'", word,
                        "' belongs to TorchTitan's configs in Python, which can't be read here: "
                        "write their values as TOML (docs/from_torchtitan.md)"));
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
void check_short_options(const Parser& parser, const Arguments& words) {
  for (size_t i = 1; i < words.size(); ++i) {
    const std::string &setting = words[i - 1], &word = words[i];
    const bool open = is_setting(setting) && setting.find('=') == std::string::npos;
    if (open && (word.starts_with("-n") || (word.starts_with("-h") && word != "-h")))
      parser.refuse(str("is '", word, "' the value of ", setting, " or an option? Write ", setting, "=", word,
                        " for the value; put options before the first setting"));
  }
}

constexpr const char* kTrainNotes =
    R"(CONFIG is a TOML or JSON file. Without it, defaults and the given settings apply. Put it before the first
setting: after a setting it would be read as the setting's value.

Precedence: command line, CONFIG, the files that it includes, the defaults in brackets.
Switches are --section.key and --section.no_key. Lists are a,b. "none" unsets an optional setting.
Write a value that looks like an option as --section.key=value.
)";

constexpr const char* kPlanNotes =
    R"(Builds one rank of each role of the job on a GPU that exists only as counts, runs a few steps of it, and prints
what it is given: memory, collectives, launches, FLOPs, and how long a step would take. Needs neither GPUs nor data, weights or a tokenizer.
CONFIG and settings are those of titan train; see docs/plan.md.
)";

constexpr const char* kLaunchNotes =
    R"(Starts N ranks of a program on this machine and waits for them. They find each other with dist::init().
When a rank fails, the others are ended, its last lines are printed unless they were shown, and its exit code
becomes this command's. With --max-restarts the ranks are restarted, unless the exit code is a final one.
SIGTERM, SIGINT and SIGUSR1 go to all ranks and end the job; SIGUSR2 brings lost ranks back; SIGQUIT goes to
all ranks that handle it, and the job continues. See docs/elastic.md.
)";

// Before the work whose results they take.
void refuse_unwritable(const Parser& parser,
                       const std::vector<std::pair<const char*, std::filesystem::path>>& files) {
  for (const auto& [option, file] : files) {
    if (file.empty()) continue;
    const std::filesystem::path folder = file.has_parent_path() ? file.parent_path() : ".";
    if (std::filesystem::is_directory(file)) parser.refuse(str(option, " = ", file.string(), " is a folder"));
    if (::access(folder.c_str(), W_OK) != 0)
      parser.refuse(str(option, " = ", file.string(), ": can't write to the folder: ", std::strerror(errno)));
  }
}

}  // namespace

Parser::Parser(std::string name, const std::string& usage, std::string notes) : name_(std::move(name)) {
  app.formatter(std::make_shared<Format>(str(name_, " ", usage)));
  app.footer(std::move(notes));
  app.set_help_flag("-h,--help", "this text");
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
}

void Parser::parse(const Arguments& words) {
  try {
    app.parse(Arguments(words.rbegin(), words.rend()));  // CLI11 takes them from the back
  } catch (const CLI::CallForHelp&) {
    throw HelpText{app.help()};
  } catch (const CLI::ParseError& error) {
    refuse(error.what());
  }
}

void Parser::refuse(const std::string& problem) const {
  throw ConfigError(str(name_, ": ", problem, " (see ", name_, " --help)"));
}

void Parser::refuse_option(const std::string& word) const {
  Arguments known;
  for (const CLI::Option* option : app.get_options())
    for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
  refuse(str("unknown option '", word, "'", did_you_mean(word.substr(0, word.find('=')), known)));
}

TrainArguments parse_train_arguments(const Arguments& words) {
  TrainArguments arguments;
  Parser parser("titan train", "[CONFIG] [options] [--section.key value ...]", kTrainNotes);
  add_ranks(parser, arguments.num_ranks);
  add_log_rank(parser, arguments.log_rank);
  add_restart_options(parser, arguments.restarts, "the limits for a step and a save", arguments.stop_grace);
  parser.flag("--print-config", arguments.print_config, "print the resolved config as TOML, and stop");
  parser.flag("--print-plan", arguments.print_plan,
              "print what tensor parallelism does to each module and how many bytes it moves per step, and "
              "stop; for N ranks, or the product of the degrees; starts none of them");
  parser.flag(
      "--check", arguments.check,
      "report everything that a start would refuse, and stop: settings, files, tokenizer, the "
      "checkpoint to resume from, the model on N ranks, its memory; exit code 2 if anything is wrong");
  bool report_roofline = false;
  parser.flag("--report-roofline", report_roofline,
              "measure the fourth step: a table of its operations and collectives, with their share of the "
              "device's limits; the same as --metrics.report_roofline");
  parser.app.allow_extras();
  check_short_options(parser, words);
  parser.parse(words);
  check_restarts(parser, arguments.restarts);
  sort_words(parser, arguments, parser.app.remaining());
  const bool names_a_run = !arguments.config.empty() || !arguments.overrides.empty();
  if (report_roofline && names_a_run) arguments.overrides.push_back("--metrics.report_roofline=true");
  const auto named = config::override_value(arguments.overrides, "job.config_file");
  if (named && *named != "none") take_config(parser, arguments, *named);
  return arguments;
}

PlanArguments parse_plan_arguments(const Arguments& words) {
  PlanArguments arguments;
  Parser parser("titan plan", "CONFIG --world N [options] [--section.key value ...]", kPlanNotes);
  parser.number("--world", arguments.world_size, CLI::Range(1, kMostRanks), "ranks of the job");
  parser.value(
      "--device", arguments.device, "NAME|FILE",
      "the GPU of each rank: a file of configs/devices/ without .toml (default h100), or a .toml file");
  parser.value("--kernels", arguments.kernels, "ours|compiled|eager",
               "whose kernels to time: LibTitan's (default), torch.compile's, or eager PyTorch's");
  parser.flag("--json", arguments.json, "print one JSON object");
  parser.value("--timeline", arguments.timeline, "FILE",
               "write what each stream does in a step: a trace for https://ui.perfetto.dev");
  parser.value("--svg", arguments.svg, "FILE", "write a picture of streams and memory over a step");
  parser
      .number("--for-run", arguments.for_run, CLI::PositiveNumber,
              "the plan is for the run of this process, which has started the plan: end when it ends, and "
              "don't look for changes that would make the job fit",
              "PID")
      ->group("");  // titan train's own: the help doesn't list it
  parser.flag("--search", arguments.search,
              "find the fastest layout of the job that fits, and show the best ten");
  parser.number("--sequences", arguments.sequences, CLI::Range(1, 100'000'000),
                "with --search: sequences of a step, of all ranks (default: as CONFIG says)", "N");
  parser.number("--max-tp", arguments.max_tensor, CLI::Range(1, kMostRanks),
                "with --search: the largest tensor-parallel degree (default: the devices of a host)", "N");
  parser.number("--max-cp", arguments.max_context, CLI::Range(1, kMostRanks),
                "with --search: the largest context-parallel degree (default: the devices of a host)", "N");
  parser.number("--max-pp", arguments.max_pipeline, CLI::Range(1, kMostRanks),
                "with --search: the largest pipeline-parallel degree (default: the layers)", "N");
  parser.number("--seconds", arguments.search_seconds, CLI::Range(1, 1'000'000),
                "with --search: stop planning layouts after S seconds (default 200)", "S");
  bool keep_precision = false;
  parser.flag("--keep-precision", keep_precision, "with --search: no layouts in Float8");
  parser.flag("--least-memory", arguments.least_memory, "with --search: the layouts that take least memory");
  parser.value("--output", arguments.output, "FILE",
               "with --search: the file for the best layout's config (default: CONFIG_NxDEVICE.toml, here)");
  parser.value("--calibrate", arguments.calibrate, "FILE",
               "instead of a plan: measure this machine's GPU or CPU, for --world ranks on it, and write its "
               "device file; links between GPUs and hosts are those of --device");
  parser
      .value("--measure-links", arguments.links, "FILE",
             "measure as one rank of a calibration, and write FILE")
      ->group("");  // --calibrate's own
  parser.app.allow_extras();
  check_short_options(parser, words);
  parser.parse(words);
  TrainArguments job;
  sort_words(parser, job, parser.app.remaining());
  arguments.config = job.config;
  arguments.overrides = job.overrides;
  refuse_unwritable(parser, {{"--timeline", arguments.timeline},
                             {"--svg", arguments.svg},
                             {"--output", arguments.output},
                             {"--calibrate", arguments.calibrate}});
  const bool has_limits = arguments.sequences > 0 || arguments.max_tensor > 0 || arguments.max_context > 0 ||
                          arguments.max_pipeline > 0 || keep_precision || arguments.least_memory ||
                          !arguments.output.empty() ||
                          arguments.search_seconds != PlanArguments().search_seconds;
  const bool shows_one_job = !(arguments.timeline.empty() && arguments.svg.empty());
  if (!arguments.links.empty()) return arguments;
  if (!arguments.calibrate.empty()) {
    if (!job.config.empty() || !job.overrides.empty() || arguments.search || arguments.json || has_limits ||
        shows_one_job || arguments.for_run > 0 || arguments.kernels != PlanArguments().kernels)
      parser.refuse("--calibrate plans nothing: with it go only --world and --device");
    arguments.world_size = std::max(arguments.world_size, 1);
    return arguments;
  }
  if (arguments.world_size == 0) parser.refuse("--world is missing");
  if (has_limits && !arguments.search)
    parser.refuse(
        "--sequences, --max-tp, --max-cp, --max-pp, --seconds, --keep-precision, --least-memory and --output "
        "need --search");
  if (arguments.search && arguments.for_run > 0)
    parser.refuse("--for-run is for the plan of a run, and --search plans many jobs");
  if (arguments.search && shows_one_job)
    parser.refuse(
        "--timeline and --svg show one job, and --search plans many; plan the config of its --output");
  if (arguments.config.empty() && arguments.overrides.empty())
    parser.refuse("a config file or settings are missing");
  arguments.search_float8 = !keep_precision;
  static const std::vector<std::string> kernels = {"ours", "compiled", "eager"};
  if (std::ranges::find(kernels, arguments.kernels) == kernels.end())
    parser.refuse(str("--kernels ", arguments.kernels, " must be one of ", c10::Join(", ", kernels)));
  return arguments;
}

LaunchOptions parse_launch_arguments(const Arguments& words) {
  LaunchOptions options;
  int unit = 1;
  Parser parser("titan launch", "-n N [options] [--] program [arguments ...]", kLaunchNotes);
  add_ranks(parser, options.num_ranks)->required();
  add_log_rank(parser, options.log_rank);
  add_restart_options(parser, options.restarts, "30", options.stop_grace);
  parser.number(
      "--multiple-of", unit, CLI::Range(1, kMostRanks),
      "smaller groups have a multiple of N ranks: the product of a mesh's fixed degrees (default 1)");
  add_read(
      parser, "--final-codes", "C[,C...]",
      "with --max-restarts: exit codes that are never retried, or none (default 2,3: refused settings, "
      "and a run that found wrong numbers)",
      [&](const std::string& text) { options.restarts.final_codes = read_codes("--final-codes", text); });
  parser.app.prefix_command();
  parser.parse(words);
  check_restarts(parser, options.restarts);
  options.command = parser.app.remaining();
  if (!options.command.empty() && options.command.front() == "--") {
    options.command.erase(options.command.begin());
  } else if (!options.command.empty() && options.command.front().starts_with("-")) {
    parser.refuse_option(options.command.front());
  }
  if (options.command.empty()) parser.refuse("the program to start is missing");
  options.restarts.fits = [unit](int size) { return size % unit == 0; };
  return options;
}

}  // namespace titan::cli

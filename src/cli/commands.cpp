// titan::cli::main: finds the command, runs it, and is the one place that catches errors. `titan`,
// `titan checkpoint` and `titan debug` are command groups: each has a table of commands here.

#include "cli/commands.h"

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <exception>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "cli/checkpoint/commands.h"
#include "cli/debug/commands.h"
#include "cli/parser.h"
#include "cli/text.h"
#include "core/process.h"
#include "job/job_config.h"
#include "titan/cli/main.h"
#include "titan/config/load.h"
#include "titan/core/crash.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/models/llama3.h"
#include "titan/train/run_end.h"

namespace titan::cli {

void register_builtin_models() {
  static const bool once = [] {
    models::register_llama3();
    return true;
  }();
  (void)once;
}

namespace {

constexpr int kFailure = 1;
constexpr int kUsage = 2;

struct Command {
  const char* name;
  const char* usage;  ///< the words after the name
  const char* meaning;
  int (*run)(const Arguments& words);
};

struct CommandGroup {
  std::string name;   ///< "titan checkpoint"
  std::string title;  ///< first line of the help
  std::vector<Command> commands;
  std::string notes;  ///< last lines of the help
};

const CommandGroup kTitan = {
    .name = "titan",
    .title = "titan: pre-training of language models",
    .commands = {{"train", "[CONFIG] [--nproc N] [--section.key value ...]",
                  "train a model; --help lists every setting", train_command},
                 {"launch", "-n N [--log-rank RANKS] -- program [...]",
                  "start ranks of any program on this machine", launch_command},
                 {"plan", "CONFIG --world N [--device NAME] [--json]",
                  "tell what a job takes on any number of GPUs, without them", plan_command},
                 {"compare", "RUN RUN ...", "compare the settings, losses and speed of runs",
                  compare_command},
                 {"sweep", "FILE", "train runs that differ in some settings, one after another",
                  sweep_command},
                 {"top", "RUN", "watch a run on the terminal", top_command},
                 {"report", "RUN", "write a run's report: one HTML page", report_command},
                 {"schedule", "[--schedule NAME] [--pp N] [--microbatches N]",
                  "show a pipeline schedule and what it costs", schedule_command},
                 {"checkpoint", "ls|info|verify|diff|prune|convert ...",
                  "inspect, check and convert checkpoints", checkpoint_command},
                 {"debug", "flight|dump|events ...",
                  "find the missing rank when a job hangs; join the ranks' logs", debug_command},
                 {"docs", "config|torchtitan-keys", "print a generated page of docs/", docs_command}},
    .notes =
        "  titan help, titan --version\n\ntorchrun --no-python, srun and mpirun start `titan train` as "
        "well.\n"};

const CommandGroup kCheckpoint = {
    .name = "titan checkpoint",
    .title = "usage: titan checkpoint COMMAND ...",
    .commands =
        {{"ls", "FOLDER", "list the steps of a run and their state", checkpoint_ls},
         {"info", "FOLDER [--stats] [--tensors REGEX]", "show what a checkpoint holds", checkpoint_info},
         {"verify", "FOLDER [--threads N]", "compare every byte with its checksum", checkpoint_verify},
         {"diff", "A B [--tensors REGEX]", "show what differs between two checkpoints", checkpoint_diff},
         {"prune", "FOLDER --keep K [--dry-run]", "remove all but the newest steps", checkpoint_prune},
         {"convert", "FROM TO", "convert between a step's model, a Hugging Face folder and one file",
          checkpoint_convert}},
    .notes = "\ntitan checkpoint COMMAND --help says more. None of these commands starts a job.\n"};

const CommandGroup kDebug = {
    .name = "titan debug",
    .title = "usage: titan debug COMMAND ...",
    .commands = {{"dump", "RUN", "make a running job write its flight records now", debug_dump},
                 {"flight", "FOLDER [--last N]", "show which rank is missing from which collective call",
                  debug_flight},
                 {"events", "RUN [--perfetto FILE]", "join the ranks' structured logs to one trace",
                  debug_events}},
    .notes = "\ntitan debug COMMAND --help says more. None of these commands starts a job.\n"};

std::string help_of(const CommandGroup& group) {
  const std::string prefix = &group == &kTitan ? "  titan " : "  ";
  TextTable table;
  for (const Command& command : group.commands)
    table.rows.push_back({str(prefix, command.name, " ", command.usage), command.meaning});
  return str(group.title, "\n\n", to_string(table), group.notes);
}

std::string names_of(const CommandGroup& group) {
  std::vector<const char*> names;
  for (const Command& command : group.commands) names.push_back(command.name);
  return c10::Join(", ", names);
}

// Runs the command that the first word names.
int dispatch(const CommandGroup& group, const Arguments& words) {
  if (words.empty())
    throw ConfigError(
        str(group.name, " needs a command: ", names_of(group), " (see ", group.name, " --help)"));
  const std::string& name = words.front();
  if (name == "--help" || name == "-h" || name == "help") throw HelpText{help_of(group)};
  std::vector<std::string> known = {"help"};
  for (const Command& command : group.commands) {
    if (name == command.name) return command.run(Arguments(words.begin() + 1, words.end()));
    known.push_back(command.name);
  }
  const std::string meant = did_you_mean(name, known);
  throw ConfigError(str("unknown command '", name, "'", meant.empty() ? "." : meant, " Commands of ",
                        group.name, ": ", names_of(group), " (see ", group.name, " --help)"));
}

int run(const Arguments& words) {
  if (words.empty()) {
    print(help_of(kTitan));
    return kUsage;
  }
  if (words.front() == "--version") return print(str("titan ", kVersion, "\n"));
  return dispatch(kTitan, words);
}

// With several ranks, a message says which rank it is from.
void print_error(const std::string& message) {
  const log::Settings settings = log::settings();
  const bool is_one_of_many = settings.rank >= 0 && settings.world_size > 1;
  std::fputs(str("titan: ", is_one_of_many ? str("rank ", settings.rank, ": ") : "", message, "\n").c_str(),
             stderr);
}

void print_problems(const ConfigError& error) {
  std::string text = error.what();
  if (error.problems().size() == 1) return print_error(text);
  for (size_t at = 0; (at = text.find('\n', at)) != std::string::npos; at += 3) text.insert(at + 1, "  ");
  print_error(str(error.problems().size(), " problems:\n  ", text));
}

}  // namespace

int checkpoint_command(const Arguments& words) { return dispatch(kCheckpoint, words); }

int debug_command(const Arguments& words) { return dispatch(kDebug, words); }

int code_of(const std::exception& error) {
  if (dynamic_cast<const ConfigError*>(&error)) return kUsage;
  return dynamic_cast<const train::UnsoundRun*>(&error) ? train::kUnsoundRunCode : kFailure;
}

int main(int argc, char** argv) {
  install_crash_handler();
  // Exceeding a file-size limit then is an error of the write, which names the file, rather than a fatal
  // signal.
  std::signal(SIGXFSZ, SIG_IGN);
  try {
    register_builtin_models();
    return run(Arguments(argv + std::min(argc, 1), argv + argc));
  } catch (const HelpText& help) {
    return print(help.text);
  } catch (const ReportedError& error) {
    return error.code;
  } catch (const ConfigError& error) {
    print_problems(error);
    return code_of(error);
  } catch (const std::exception& error) {
    print_error(str("error: ", reason_of(error)));
    return code_of(error);
  } catch (...) {
    print_error("error: an exception of unknown type");
  }
  return kFailure;
}

// titan docs: the pages of docs/ that are generated from the settings' descriptions. scripts/update_docs.sh
// writes them, and a test compares them.

namespace {

constexpr const char* kConfigHead = R"(# Settings

Generated by `scripts/update_docs.sh` from the descriptions in the code; edit those.

A config is TOML (or JSON, the same tree). `include = ["base.toml"]` at its top reads other files first. Every key can be
given on the command line too: `titan train config.toml --training.steps 100`. An optional setting that isn't set shows as
`unset`; on the command line `none` unsets it. There, a list is `a,b`, a list of lists is `a,b;c`, and both may be written as in TOML.

)";

constexpr const char* kKeysHead = R"(# TorchTitan's settings

Generated by `scripts/update_docs.sh`. The table lists every key of TorchTitan 0.2.2's configuration and says what LibTitan does
with it:

- **accepted**: the key has the same meaning.
- **mapped**: LibTitan's key of this meaning has the name that is shown.
- **refused**: only the default that is shown is allowed. The note says why.
- **refused with** a key: refused while that key is on. While it is off, TorchTitan doesn't read this key either, so any valid
  value is allowed.
- **without effect**: any valid value is allowed and ignored. These keys are about how Python works; the note says which part.

Some defaults differ from TorchTitan's on purpose. `training.dataset`, `validation.dataset` and `model.hf_assets_path` name files
that every machine with the source tree has. `activation_checkpoint.mode` is `"none"` rather than `"selective"` for every second
layer, and `activation_checkpoint.early_stop` is on: neither changes a run's numbers, and a run that has enough memory is faster.

)";

}  // namespace

int docs_command(const Arguments& words) {
  std::string page;
  Parser parser("titan docs", "config|torchtitan-keys",
                "Prints a generated page of docs/, for scripts/update_docs.sh.\n");
  parser.app.add_option("PAGE", page, "which page")
      ->required()
      ->check(CLI::IsMember({"config", "torchtitan-keys"}));
  parser.parse(words);
  const config::Schema& schema = train::job_schema();
  return print(page == "config" ? kConfigHead + config::markdown(schema)
                                : kKeysHead + config::key_table(schema, train::torchtitan_keys()));
}

}  // namespace titan::cli

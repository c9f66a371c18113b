// titan::cli::main: finds the command, runs it, and is the one place that catches.

#include <csignal>
#include <cstdio>
#include <exception>
#include <functional>
#include <map>

#include <c10/util/Exception.h>

#include "cli/builtin_models.h"
#include "cli/commands.h"
#include "cli/launch/launch.h"
#include "cli/text.h"
#include "titan/cli/main.h"
#include "titan/core/crash.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/core/version.h"
#include "titan/train/run_end.h"

namespace titan::cli {

namespace {

constexpr int kFailure = 1;
constexpr int kUsage = 2;

constexpr const char* kHelp =
    "titan: pre-training of language models\n"
    "\n"
    "  titan train [CONFIG] [--nproc N] [--section.key value ...]   train; --help lists every setting\n"
    "  titan launch -n N [--log-rank RANKS] -- program [...]        start ranks of any program on this "
    "machine\n"
    "  titan compare RUN RUN ...                                    settings, losses and speed side by side\n"
    "  titan sweep FILE                                             runs that differ in some settings, one "
    "after another\n"
    "  titan top RUN                                                a run that is under way, on the "
    "terminal\n"
    "  titan report RUN                                             a run as one HTML page\n"
    "  titan schedule [--schedule NAME] [--pp N] [--microbatches N] what a pipeline schedule looks like and "
    "costs\n"
    "  titan checkpoint ls|info|verify|diff|prune|convert ...       look into checkpoints, check and convert "
    "them\n"
    "  titan debug flight|dump|events ...                           who is missing where a job hangs; what "
    "ranks left behind, joined\n"
    "  titan docs config|torchtitan-keys                            the generated pages of docs/\n"
    "  titan help, titan --version\n"
    "\n"
    "torchrun --no-python, srun and mpirun start `titan train` as well.\n";

int help(const Arguments&) { return print(kHelp); }

int version(const Arguments&) { return print(str("titan ", kVersion, "\n")); }

const std::map<std::string, std::function<int(const Arguments&)>>& commands() {
  static const std::map<std::string, std::function<int(const Arguments&)>> table = {
      {"train", train_command},
      {"launch", launch_command},
      {"compare", compare_command},
      {"checkpoint", checkpoint_command},
      {"debug", debug_command},
      {"docs", docs_command},
      {"report", report_command},
      {"schedule", schedule_command},
      {"sweep", sweep_command},
      {"top", top_command},
      {"help", help},
      {"--help", help},
      {"-h", help},
      {"--version", version}};
  return table;
}

std::string unknown_command(const std::string& name) {
  std::vector<std::string> known;
  for (const auto& [command, run] : commands()) known.push_back(command);
  auto near = nearest_names(name, known, 1);
  return str("unknown command '", name, "'", near.empty() ? "" : str("; did you mean '", near.front(), "'?"),
             " (see titan help)");
}

int run(const Arguments& words) {
  if (words.empty()) {
    help({});
    return kUsage;
  }
  auto command = commands().find(words.front());
  if (command == commands().end()) throw ConfigError(unknown_command(words.front()));
  return command->second(Arguments(words.begin() + 1, words.end()));
}

// Who speaks: with several ranks the reader has to know which one.
std::string speaker() {
  log::Settings settings = log::settings();
  return settings.rank >= 0 && settings.world_size > 1 ? str("titan: rank ", settings.rank, ": ") : "titan: ";
}

void print_error(const std::string& message) { std::fputs((speaker() + message + "\n").c_str(), stderr); }

void print_problems(const ConfigError& error) {
  if (error.problems().size() == 1) return print_error(error.problems().front());
  std::string message = str(error.problems().size(), " problems:");
  for (const std::string& problem : error.problems()) message += "\n  " + problem;
  print_error(message);
}

}  // namespace

int main(int argc, char** argv) {
  install_crash_handler();
  // A file-size limit then is an error of the write, with the file's name, and no death by signal.
  std::signal(SIGXFSZ, SIG_IGN);
  try {
    register_builtin_models();
    return run(Arguments(argv + std::min(argc, 1), argv + argc));
  } catch (const ConfigError& error) {
    print_problems(error);
    return kUsage;
  } catch (const train::UnsoundRun& error) {
    print_error(str("error: ", error.what()));
    return train::kUnsoundRunCode;
  } catch (const c10::Error& error) {
    // LibTorch's what() ends in a backtrace of addresses, which buries the message.
    print_error(str("error: ", error.what_without_backtrace()));
  } catch (const std::exception& error) {
    print_error(str("error: ", error.what()));
  } catch (...) {
    print_error("error: an exception of unknown type");
  }
  return kFailure;
}

}  // namespace titan::cli

// titan debug: finds the command.

#include <algorithm>
#include <cstdio>
#include <map>

#include "cli/debug/commands.h"
#include "cli/text.h"
#include "titan/core/error.h"

namespace titan::cli {

namespace {

struct DebugCommand {
  int (*run)(const Arguments&);
  const char* usage;
  const char* meaning;
};

const std::map<std::string, DebugCommand>& debug_commands() {
  static const std::map<std::string, DebugCommand> table = {
      {"dump", {debug_dump, "RUN", "a running job's flight records, now"}},
      {"flight", {debug_flight, "FOLDER [--last N]", "which rank is missing from which collective call"}},
      {"events", {debug_events, "RUN [--perfetto FILE]", "the ranks' structured logs, as one trace"}},
  };
  return table;
}

std::string debug_help() {
  std::string text = "usage: titan debug COMMAND ...\n\n";
  for (const auto& [name, command] : debug_commands()) {
    std::string line = str("  ", name, " ", command.usage);
    line.resize(std::max<size_t>(line.size() + 2, 48), ' ');
    text += line + command.meaning + "\n";
  }
  return text + "\ntitan debug COMMAND --help says more. None of them starts a job.\n";
}

[[noreturn]] void refuse_debug(const std::string& problem) {
  std::string names;
  for (const auto& [name, command] : debug_commands()) names += (names.empty() ? "" : ", ") + name;
  throw ConfigError(str("titan debug: ", problem, " There are: ", names, " (see titan debug --help)"));
}

}  // namespace

int debug_command(const Arguments& words) {
  if (words.empty()) refuse_debug("what is to be done?");
  const std::string& name = words.front();
  if (name == "--help" || name == "-h") return print(debug_help());
  const auto command = debug_commands().find(name);
  if (command == debug_commands().end()) refuse_debug(str("unknown command '", name, "'."));
  return command->second.run(Arguments(words.begin() + 1, words.end()));
}

}  // namespace titan::cli

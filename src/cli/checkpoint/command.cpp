// titan checkpoint: finds the command.

#include <cstdio>
#include <map>

#include "cli/checkpoint/commands.h"
#include "titan/core/error.h"

namespace titan::cli {

namespace {

constexpr const char* kHelp =
    "usage: titan checkpoint COMMAND ...\n"
    "\n"
    "  ls FOLDER                                      the steps of a run, and their health\n"
    "  info STEP_FOLDER [--stats] [--tensors REGEX]   what a checkpoint holds\n"
    "  verify STEP_FOLDER [--threads N]               every byte against its checksum\n"
    "  diff A B [--tensors REGEX]                     what differs between two checkpoints\n"
    "  prune FOLDER --keep K [--dry-run]              remove all but the newest steps\n"
    "  convert FROM TO                                a step's model, a Hugging Face folder, one file: to "
    "another\n"
    "\n"
    "titan checkpoint COMMAND --help says more. None of them starts a job.\n";

using Command = int (*)(const Arguments&);

const std::map<std::string, Command>& checkpoint_commands() {
  static const std::map<std::string, Command> table = {
      {"ls", checkpoint_ls},     {"info", checkpoint_info},   {"verify", checkpoint_verify},
      {"diff", checkpoint_diff}, {"prune", checkpoint_prune}, {"convert", checkpoint_convert}};
  return table;
}

[[noreturn]] void refuse(const std::string& problem) {
  throw ConfigError(str("titan checkpoint: ", problem,
                        " There are: ls, info, verify, diff, prune, convert (see titan checkpoint --help)"));
}

}  // namespace

int checkpoint_command(const Arguments& words) {
  if (words.empty()) refuse("what is to be done?");
  const std::string& name = words.front();
  if (name == "--help" || name == "-h") return std::fputs(kHelp, stdout), 0;
  const auto command = checkpoint_commands().find(name);
  if (command == checkpoint_commands().end()) refuse(str("unknown command '", name, "'."));
  return command->second(Arguments(words.begin() + 1, words.end()));
}

}  // namespace titan::cli

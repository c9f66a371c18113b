#include <unistd.h>
#include <algorithm>
#include <cstdio>
#include <limits>
#include <map>

#include "cli/checkpoint/commands.h"
#include "cli/parser.h"
#include "cli/text.h"
#include "titan/core/error.h"

namespace titan::cli {

Progress::Progress() : shows_(isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() {
  if (shown_) std::fputs("\n", stderr);
}

void Progress::show(int64_t bytes, int64_t total) {
  const auto now = Clock::now();
  if (!shows_ || (bytes < total && now - last_ < std::chrono::milliseconds(100))) return;
  last_ = now;
  shown_ = true;
  const double seconds = std::max(1e-9, std::chrono::duration<double>(now - start_).count());
  std::fprintf(stderr, "\r%.2f of %.2f GB (%.0f %%), %.2f GB/s ", bytes / 1e9, total / 1e9,
               total > 0 ? 100.0 * static_cast<double>(bytes) / static_cast<double>(total) : 100.0,
               bytes / 1e9 / seconds);
}

namespace {

constexpr int kMostThreads = 1024;

constexpr const char* kConvertNotes =
    "FROM is a step's folder of a run, and TO becomes one file with its model, for\n"
    "checkpoint.initial_load_path, where its name ends in .safetensors, and else a Hugging Face folder\n"
    "(config.json, model.safetensors or shards with an index); or FROM is a Hugging Face folder, and TO "
    "becomes\n"
    "one file; or FROM is such a file, and TO becomes a folder. To a folder the tokenizer's files of the "
    "config's\n"
    "model.hf_assets_path are copied. Of a step's folder every block that is read is compared with its "
    "checksum.\n"
    "Reads and writes 16 MiB at a time, whatever the model's size. TO must not be there yet, and appears "
    "when it\n"
    "is complete.\n";

constexpr const char* kLsNotes =
    "A step is complete when its manifest reads well and its files have the sizes that it says; checksums "
    "are\n"
    "for `titan checkpoint verify`. \"model only\" is what a run can start from, but not go on from.\n";

constexpr const char* kInfoNotes =
    "Layout: along which dimensions which axes of the run's mesh cut a tensor. Figures are of the finite\n"
    "elements, std over all of them; 16 MiB are in memory at a time. A float8 tensor's are of its raw "
    "values.\n";

constexpr const char* kVerifyNotes =
    "Reads everything once, and goes on after damage: the exit code is 1, and each damaged file, tensor and\n"
    "block (1 MiB of a tensor's piece) has its line.\n";

constexpr const char* kDiffNotes =
    "The two may have been saved on different meshes. \"differs\" is by bits; the norm of the difference is\n"
    "relative to A's. Of the configs, job.dump_folder doesn't count; run, step and library are shown only.\n"
    "The exit code is 1 when they differ.\n";

constexpr const char* kPruneNotes =
    "What checkpoint.keep_latest_k does in a run: never removes the newest step whose numbers are all "
    "finite,\n"
    "nor a model alone. Removes what killed runs left too. Refused while a run writes to the folder.\n";

void add_path(CLI::App& app, const std::string& name, std::filesystem::path& path, const std::string& text) {
  app.add_option(name, path, text)->required();
}

constexpr const char* kFolderText = "a run's folder, or that of its checkpoints";

void add_tensors(CLI::App& app, std::string& pattern) {
  app.add_option("--tensors", pattern, "only those in whose names this regular expression matches somewhere")
      ->type_name("REGEX");
}

}  // namespace

ConvertArguments parse_convert_arguments(const std::vector<std::string>& words) {
  ConvertArguments arguments;
  Parser parser("titan checkpoint convert",
                "titan checkpoint convert FROM TO [--config FILE] [--dtype DTYPE] [--shard-gb SIZE]",
                kConvertNotes);
  CLI::App& app = parser.app;
  add_path(app, "FROM", arguments.from,
           "a step's folder, a Hugging Face folder, or a safetensors file of ours");
  add_path(app, "TO", arguments.to, "a file NAME.safetensors, or a Hugging Face folder");
  app.add_option(
         "--config", arguments.config,
         "a run's config, whose [model] it is; needed to write a folder where FROM doesn't have it (a "
         "step's has), checked against a Hugging Face folder that is read")
      ->type_name("FILE");
  app.add_option("--dtype", arguments.dtype, "float32, bfloat16 or float16 (default: as they are)")
      ->type_name("DTYPE")
      ->check(CLI::IsMember({"float32", "bfloat16", "float16"}).description(""));
  app.add_option("--shard-gb", arguments.shard_gb, "largest file of a folder, in 10^9 bytes (default 5)")
      ->type_name("SIZE")
      ->check(CLI::Range(1e-6, 1e6).description(""));
  arguments.help = parser.parse(words);
  return arguments;
}

LsArguments parse_ls_arguments(const std::vector<std::string>& words) {
  LsArguments arguments;
  Parser parser("titan checkpoint ls", "titan checkpoint ls FOLDER [--json]", kLsNotes);
  add_path(parser.app, "FOLDER", arguments.folder, kFolderText);
  parser.app.add_flag("--json", arguments.json, "for programs");
  arguments.help = parser.parse(words);
  return arguments;
}

InfoArguments parse_info_arguments(const std::vector<std::string>& words) {
  InfoArguments arguments;
  Parser parser("titan checkpoint info",
                "titan checkpoint info STEP_FOLDER [--stats] [--tensors REGEX] [--json]", kInfoNotes);
  add_path(parser.app, "STEP_FOLDER", arguments.folder, "one step's folder");
  parser.app.add_flag("--stats", arguments.stats, "read the tensors: mean, std, min, max, norm, not finite");
  add_tensors(parser.app, arguments.tensors);
  parser.app.add_flag("--json", arguments.json, "for programs");
  arguments.help = parser.parse(words);
  return arguments;
}

VerifyArguments parse_verify_arguments(const std::vector<std::string>& words) {
  VerifyArguments arguments;
  Parser parser("titan checkpoint verify", "titan checkpoint verify STEP_FOLDER [--threads N]", kVerifyNotes);
  add_path(parser.app, "STEP_FOLDER", arguments.folder, "one step's folder");
  parser.app.add_option("--threads", arguments.num_threads, "that read (default: one a core, 8 at most)")
      ->type_name("N")
      ->check(CLI::Range(1, kMostThreads).description(""));
  arguments.help = parser.parse(words);
  return arguments;
}

DiffArguments parse_diff_arguments(const std::vector<std::string>& words) {
  DiffArguments arguments;
  Parser parser("titan checkpoint diff", "titan checkpoint diff A B [--tensors REGEX]", kDiffNotes);
  add_path(parser.app, "A", arguments.a, "one step's folder");
  add_path(parser.app, "B", arguments.b, "another one");
  add_tensors(parser.app, arguments.tensors);
  arguments.help = parser.parse(words);
  return arguments;
}

PruneArguments parse_prune_arguments(const std::vector<std::string>& words) {
  PruneArguments arguments;
  Parser parser("titan checkpoint prune", "titan checkpoint prune FOLDER --keep K [--dry-run] [--force]",
                kPruneNotes);
  add_path(parser.app, "FOLDER", arguments.folder, kFolderText);
  parser.app.add_option("--keep", arguments.keep, "how many of the newest steps stay")
      ->required()
      ->type_name("K")
      ->check(CLI::Range(int64_t{1}, std::numeric_limits<int64_t>::max()).description(""));
  parser.app.add_flag("--dry-run", arguments.dry_run, "say what would be removed, and stop");
  parser.app.add_flag("--force", arguments.force, "where the file system has no locks: no run writes there");
  arguments.help = parser.parse(words);
  return arguments;
}

// titan checkpoint: finds the command.

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
  if (name == "--help" || name == "-h") return print(kHelp);
  const auto command = checkpoint_commands().find(name);
  if (command == checkpoint_commands().end()) refuse(str("unknown command '", name, "'."));
  return command->second(Arguments(words.begin() + 1, words.end()));
}

}  // namespace titan::cli

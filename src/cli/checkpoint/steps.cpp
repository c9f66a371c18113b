// titan checkpoint ls, verify and prune: the steps of a run, their health, and the removal of old ones.

#include <algorithm>
#include <cstdio>
#include <limits>
#include <thread>

#include <nlohmann/json.hpp>

#include "cli/checkpoint/commands.h"
#include "cli/parser.h"
#include "cli/text.h"
#include "core/json.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"

namespace titan::cli {

namespace {

constexpr const char* kFolderText = "a run's folder, or the folder of its checkpoints";

constexpr const char* kLsNotes =
    R"(A step is complete if its manifest is valid and its files have the sizes that the manifest lists; `titan
checkpoint verify` compares checksums. A run can start from a step that is "model only", but can't resume from it.
)";

constexpr const char* kVerifyNotes =
    R"(Reads everything once and continues after damage. Prints a line for each damaged file, tensor and block (1 MiB of
a tensor's piece); the exit code then is 1.
)";

constexpr const char* kPruneNotes =
    R"(Removes what checkpoint.keep_latest_k would remove in a run: never the newest step whose numbers are all finite,
and never a folder that has only a model. Also removes what killed runs left. Refuses while a run writes to the
folder.
)";

}  // namespace

LsArguments parse_ls_arguments(const Arguments& words) {
  LsArguments arguments;
  Parser parser("titan checkpoint ls", "FOLDER [--json]", kLsNotes);
  parser.path("FOLDER", arguments.folder, kFolderText);
  parser.flag("--json", arguments.json, "print JSON, for programs");
  parser.parse(words);
  return arguments;
}

VerifyArguments parse_verify_arguments(const Arguments& words) {
  VerifyArguments arguments;
  Parser parser("titan checkpoint verify", "STEP_FOLDER [--threads N]", kVerifyNotes);
  parser.path("STEP_FOLDER", arguments.folder, "the folder of one step");
  parser.number("--threads", arguments.num_threads, CLI::Range(1, 1024),
                "read with N threads (default: one per core, at most 8)");
  parser.parse(words);
  return arguments;
}

PruneArguments parse_prune_arguments(const Arguments& words) {
  PruneArguments arguments;
  Parser parser("titan checkpoint prune", "FOLDER --keep K [--dry-run] [--force]", kPruneNotes);
  parser.path("FOLDER", arguments.folder, kFolderText);
  parser
      .number("--keep", arguments.keep, CLI::Range(int64_t{1}, std::numeric_limits<int64_t>::max()),
              "how many of the newest steps to keep", "K")
      ->required();
  parser.flag("--dry-run", arguments.dry_run, "print what would be removed, and stop");
  parser.flag("--force", arguments.force,
              "prune on a file system without locks; make sure that no run writes to the folder");
  parser.parse(words);
  return arguments;
}

namespace {

namespace fs = std::filesystem;
using namespace checkpoint;
using Json = nlohmann::ordered_json;

std::string table_of(const std::vector<StepHealth>& steps) {
  TextTable table{.rows = {{"step", "size", "files", "tensors", "written", "library", "state"}},
                  .right = {true, true, true, true}};
  for (const StepHealth& health : steps) {
    const auto& manifest = health.manifest;
    table.rows.push_back({std::to_string(health.entry.step), size_text(health.num_bytes),
                          std::to_string(health.num_files),
                          manifest ? std::to_string(manifest->table.tensors().size()) : "-", health.written(),
                          manifest ? manifest->library : "-", health.state()});
  }
  return to_string(table);
}

Json json_of(const StepHealth& health) {
  Json step = {{"step", health.entry.step},
               {"path", health.entry.path.string()},
               {"state", health.state_word()},
               {"problems", health.problems},
               {"bytes", health.num_bytes},
               {"files", health.num_files},
               {"written", health.written(/*utc=*/true)}};
  if (!health.manifest) return step;
  step["tensors"] = health.manifest->table.tensors().size();
  step["run_id"] = health.manifest->run_id;
  step["library"] = health.manifest->library;
  step["finite"] = health.manifest->finite;
  return step;
}

const char* meaning_of(LeftoverKind kind) {
  switch (kind) {
    case LeftoverKind::Pending:
      return "being written, or left by a run that was killed";
    case LeftoverKind::Replaced:
      return "being replaced by another step, or left by a run that was killed";
    case LeftoverKind::Removed:
      return "being removed, or left by a run that was killed";
  }
  return "";
}

std::string others_text(const fs::path& folder, const std::vector<Leftover>& leftovers) {
  std::string text;
  for (const fs::path& path : list_put_aside(folder))
    text += str(path.filename().string(), ": put aside when a new step took its name\n");
  for (const Leftover& leftover : leftovers)
    text += str(leftover.path.filename().string(), ": ", meaning_of(leftover.kind), "\n");
  return text;
}

Json json_of(const fs::path& folder, const std::vector<StepHealth>& steps,
             const std::vector<Leftover>& leftovers) {
  Json all = {{"folder", folder.string()},
              {"steps", Json::array()},
              {"leftovers", Json::array()},
              {"put_aside", Json::array()}};
  for (const StepHealth& health : steps) all["steps"].push_back(json_of(health));
  for (const Leftover& leftover : leftovers) all["leftovers"].push_back(leftover.path.string());
  for (const fs::path& path : list_put_aside(folder)) all["put_aside"].push_back(path.string());
  return all;
}

}  // namespace

int checkpoint_ls(const Arguments& words) {
  const LsArguments arguments = parse_ls_arguments(words);
  const fs::path folder = steps_folder(arguments.folder, "ls");
  std::vector<StepHealth> steps;
  for (const StepEntry& entry : list_steps(folder)) {
    StepHealth health = examine_step(entry);
    if (fs::exists(entry.path)) steps.push_back(std::move(health));  // else a run has just removed it
  }
  const std::vector<Leftover> leftovers = list_leftovers(folder);
  if (arguments.json) return print(titan::json_text(json_of(folder, steps, leftovers), 2) + "\n");
  return print(str(steps.empty() ? "no steps in " : "", folder.string(), "\n",
                   steps.empty() ? "" : table_of(steps), others_text(folder, leftovers)));
}

namespace {

// More threads would only wait for the disk.
constexpr int kMostThreads = 8;

int default_threads() {
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, kMostThreads);
}

std::string amount_text(const VerifyReport& report, double seconds) {
  return str(plural(report.num_tensors, "tensor"), " in ", plural(report.num_files, "file"), ", ",
             size_text(report.num_bytes), " read in ", number("%.2f s", seconds),
             number(", %.2f GB/s", static_cast<double>(report.num_bytes) / 1e9 / std::max(seconds, 1e-9)));
}

}  // namespace

int checkpoint_verify(const Arguments& words) {
  const VerifyArguments arguments = parse_verify_arguments(words);
  const auto folder = step_folder(arguments.folder, "verify");
  VerifyOptions options;
  options.num_threads = arguments.num_threads > 0 ? arguments.num_threads : default_threads();
  const auto start = std::chrono::steady_clock::now();
  const VerifyReport report = [&] {
    ProgressLine progress;
    options.progress = [&progress](int64_t bytes, int64_t total) { progress.show(bytes, total); };
    return verify_step(folder, options);
  }();
  const std::string amount = amount_text(report, seconds_since(start));
  for (const Damage& damage : report.damages) std::printf("%s\n", to_string(damage).c_str());
  if (report.damages.empty()) return print(str(folder.string(), " is intact: ", amount, "\n"));
  print(str(folder.string(), " is damaged in ", plural(static_cast<int64_t>(report.damages.size()), "place"),
            ": ", amount, "\n"));
  return 1;
}

namespace {

// Takes the place of a run's id in the names of folders that are half removed.
constexpr const char* kRemover = "prune";

void print_dry_run(const PruneArguments& arguments, const fs::path& folder) {
  for (const Leftover& leftover : list_leftovers(folder)) {
    if (lacks_successor(leftover, folder))
      std::printf("would restore %s from %s, unless a run writes here\n",
                  step_path(folder, leftover.step).c_str(), leftover.path.c_str());
    else
      std::printf("would remove %s, unless a run writes here\n", leftover.path.c_str());
  }
  for (const StepEntry& step : steps_to_prune(list_steps(folder), arguments.keep))
    std::printf("would remove %s\n", step.path.c_str());
}

void prune(const PruneArguments& arguments, const fs::path& folder) {
  const FolderLock lock(folder);
  if (!lock.held() && !arguments.force)
    throw Error(str(folder.string(),
                    ": cannot tell whether a run writes here, because the file system has no locks; if none "
                    "does, add --force"));
  clean_leftovers(folder, lock);
  for (const StepEntry& step : steps_to_prune(list_steps(folder), arguments.keep)) {
    remove_step(step, kRemover);
    std::printf("removed %s\n", step.path.c_str());
  }
}

}  // namespace

int checkpoint_prune(const Arguments& words) {
  const PruneArguments arguments = parse_prune_arguments(words);
  const auto folder = steps_folder(arguments.folder, "prune");
  const size_t before = list_steps(folder).size();
  arguments.dry_run ? print_dry_run(arguments, folder) : prune(arguments, folder);
  const size_t removed = arguments.dry_run ? steps_to_prune(list_steps(folder), arguments.keep).size()
                                           : before - list_steps(folder).size();
  return print(str(plural(static_cast<int64_t>(before - removed), "step"), " of ", before,
                   arguments.dry_run ? " would stay\n" : " stay\n"));
}

}  // namespace titan::cli

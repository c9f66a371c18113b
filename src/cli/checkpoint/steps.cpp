// The folders and steps of `titan checkpoint`'s commands, what they share, and ls, verify and prune: the
// steps of a run, their health, and the removal of old ones.

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <limits>
#include <regex>
#include <system_error>
#include <thread>

#include <nlohmann/json.hpp>

#include "cli/checkpoint/commands.h"
#include "cli/parser.h"
#include "cli/text.h"
#include "core/json.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"

namespace titan::cli {

namespace fs = std::filesystem;

namespace {
using namespace checkpoint;
}

ProgressLine::ProgressLine() : on_terminal_(isatty(STDERR_FILENO) != 0) {}

ProgressLine::~ProgressLine() {
  if (shown_) std::fputs("\n", stderr);
}

void ProgressLine::show(int64_t bytes, int64_t total) {
  const auto now = Clock::now();
  if (!on_terminal_ || (bytes < total && now - last_ < std::chrono::milliseconds(100))) return;
  last_ = now;
  shown_ = true;
  const auto done = static_cast<double>(bytes), all = static_cast<double>(total);
  std::fprintf(stderr, "\r%.2f of %.2f GB (%.0f %%), %.2f GB/s ", done / 1e9, all / 1e9,
               total > 0 ? 100 * done / all : 100.0, done / 1e9 / std::max(1e-9, seconds_since(start_)));
}

void add_tensors(Parser& parser, std::string& pattern) {
  parser.value("--tensors", pattern, "REGEX",
               "only tensors with a name in which this regular expression matches");
}

std::function<bool(const std::string&)> tensor_filter(const std::string& pattern) {
  if (pattern.empty()) return [](const std::string&) { return true; };
  try {
    return [expression = std::regex(pattern)](const std::string& name) {
      return std::regex_search(name, expression);
    };
  } catch (const std::regex_error& error) {
    throw ConfigError(str("--tensors: '", pattern, "' is not a regular expression: ", error.what()));
  }
}

namespace {

[[noreturn]] void refuse(std::string_view command, const std::string& problem) {
  throw ConfigError(str("titan checkpoint ", command, ": ", problem));
}

fs::path without_slash(const fs::path& path) { return path.has_filename() ? path : path.parent_path(); }

fs::path parent_of(const fs::path& path) {
  const fs::path parent = without_slash(path).parent_path();
  return parent.empty() ? fs::path(".") : parent;
}

bool is_step(const fs::path& folder) {
  return fs::exists(folder / kManifestName) || without_slash(folder).filename().string().starts_with("step-");
}

// Also true for the folder of a run that hasn't saved a step yet.
bool holds_steps(const fs::path& folder) {
  return !list_steps(folder).empty() || !list_leftovers(folder).empty() || fs::exists(folder / ".lock");
}

// A folder that can't be read, such as lost+found, doesn't count.
bool is_seen_to_hold_steps(const fs::path& folder) {
  try {
    return holds_steps(folder);
  } catch (const std::exception&) {
    return false;
  }
}

std::vector<fs::path> folders_with_steps_in(const fs::path& run) {
  std::vector<fs::path> found;
  std::error_code gone;
  for (fs::directory_iterator entry(run, gone); !gone && entry != fs::directory_iterator();
       entry.increment(gone)) {
    std::error_code ignored;
    if (entry->is_directory(ignored) && !entry->is_symlink(ignored) && is_seen_to_hold_steps(entry->path()))
      found.push_back(entry->path());
  }
  return found;
}

// The newest step in a folder or in the folders in it: "; the newest step in it is ..."; "" if there is none.
std::string newest_text(const fs::path& folder) {
  std::vector<fs::path> folders = {folder};
  for (const fs::path& below : folders_with_steps_in(folder)) folders.push_back(below);
  for (const fs::path& candidate : folders)
    if (const auto steps = list_steps(candidate); !steps.empty())
      return str("; the newest step in it is ", steps.back().path.string());
  return "";
}

void check_folder(const fs::path& given, std::string_view command) {
  if (fs::is_directory(given)) return;
  if (fs::exists(given)) refuse(command, str(given.string(), " is a file, not a folder"));
  const fs::path parent = parent_of(given);
  const std::string newest = fs::is_directory(parent) ? newest_text(parent) : "";
  refuse(command, str("there is no folder ", given.string(),
                      newest.empty() ? "" : str(" in ", parent.string(), newest)));
}

// Counts the files that exist, whether or not the manifest has them. A run may be removing them.
void count_files(StepHealth& health) {
  std::error_code gone;
  for (fs::directory_iterator entry(health.entry.path, gone); !gone && entry != fs::directory_iterator();
       entry.increment(gone)) {
    std::error_code ignored;
    if (entry->is_symlink(ignored) || !entry->is_regular_file(ignored)) continue;
    const auto num_bytes = entry->file_size(ignored);
    if (ignored) continue;
    ++health.num_files;
    health.num_bytes += static_cast<int64_t>(num_bytes);
  }
}

}  // namespace

StepHealth examine_step(const StepEntry& entry) {
  StepHealth health{.entry = entry, .model_only = holds_model_alone(entry.path)};
  count_files(health);
  try {
    if (health.model_only) {
      if (fs::exists(entry.path / kModelManifestName))
        health.problems = quick_problems(entry.path, read_model_manifest(entry.path));
      return health;
    }
    if (entry.has_manifest) health.manifest = read_manifest(entry.path);
    health.problems =
        health.manifest ? quick_problems(entry.path, *health.manifest) : quick_problems(entry.path);
  } catch (const Error& error) {
    health.problems = {error.what()};
  }
  return health;
}

const char* StepHealth::state_word() const {
  if (model_only && problems.empty()) return "model only";
  return problems.empty() ? "complete" : "damaged";
}

std::string StepHealth::state() const {
  std::string text = state_word();
  if (manifest && !manifest->finite) text += ", not all finite";
  if (problems.empty()) return text;
  text += ": " + problems.front();
  if (problems.size() > 1) text += str(" (and ", problems.size() - 1, " more)");
  return text;
}

std::string StepHealth::written(bool utc) const {
  return written_text(entry.has_manifest ? entry.path / kManifestName : entry.path, utc);
}

fs::path steps_folder(const fs::path& given, std::string_view command) {
  check_folder(given, command);
  if (holds_steps(given)) return without_slash(given);
  if (is_step(given))
    refuse(command,
           str(given.string(), " is one step; give the folder that holds it: ", parent_of(given).string()));
  const std::vector<fs::path> found = folders_with_steps_in(given);
  if (found.size() == 1) return found.front();
  if (found.empty())
    refuse(command, str("there are no checkpoints in ", given.string(),
                        ": neither it nor a folder in it has a step-N"));
  std::string names;
  for (const fs::path& folder : found) names += " " + folder.string();
  refuse(command, str(given.string(), " has several folders of checkpoints; give one of:", names));
}

fs::path step_folder(const fs::path& given, std::string_view command) {
  check_folder(given, command);
  if (holds_model_alone(given) && newest_text(given).empty()) {
    const bool has_manifest = fs::exists(given / kModelManifestName);
    if (command == "convert" || (command == "verify" && has_manifest)) return without_slash(given);
    refuse(command, str(given.string(), " holds only a model", has_manifest ? "" : ", without checksums",
                        "; `titan checkpoint ", command, "` needs a checkpoint of a run's whole state"));
  }
  if (is_step(given)) return without_slash(given);
  const std::string newest = newest_text(given);
  if (newest.empty()) refuse(command, str(given.string(), " is not a checkpoint: it has no manifest.json"));
  refuse(command, str(given.string(), " is a run's folder, not a step's", newest));
}

fs::path step_or_newest(const fs::path& given, std::string_view command, NewestStep newest) {
  if (!fs::is_directory(given) || is_step(given) || newest_text(given).empty())
    return step_folder(given, command);
  const fs::path folder = steps_folder(given, command);
  const std::vector<StepEntry> steps = list_steps(folder);
  const auto counts = [&](const StepEntry& entry) {
    if (newest == NewestStep::OfAnyKind || !holds_model_alone(entry.path)) return true;
    return newest == NewestStep::WithChecksums && fs::exists(entry.path / kModelManifestName);
  };
  const auto step = std::find_if(steps.rbegin(), steps.rend(), counts);
  if (step == steps.rend())
    refuse(command, str("the steps in ", folder.string(), " hold only models",
                        newest == NewestStep::WithChecksums ? ", without manifest and checksums" : ""));
  std::fprintf(stderr, "titan checkpoint %s: taking the newest step, %s\n", std::string(command).c_str(),
               step->path.c_str());
  return step->path;
}

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
and never a folder that has only a model. Also removes leftovers of killed runs. Refuses while a run writes to
the folder.
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
  Parser parser("titan checkpoint verify", "FOLDER [--threads N]", kVerifyNotes);
  parser.path("FOLDER", arguments.folder, kStepOrRunText);
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

// The fate of a leftover, unless it is from a killed run.
const char* fate_of(LeftoverKind kind) {
  if (kind == LeftoverKind::Pending) return "written";
  return kind == LeftoverKind::Replaced ? "replaced by another step" : "removed";
}

std::string others_text(const fs::path& folder, const std::vector<Leftover>& leftovers) {
  std::string text;
  for (const fs::path& path : list_put_aside(folder))
    text += str(path.filename().string(), ": put aside when a new step took its name\n");
  for (const Leftover& leftover : leftovers)
    text += str(leftover.path.filename().string(), ": being ", fate_of(leftover.kind),
                ", or left by a killed run\n");
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
  const auto folder = step_or_newest(arguments.folder, "verify", NewestStep::WithChecksums);
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
  print(str(folder.string(), " is damaged in ", plural(report.damages.size(), "place"), ": ", amount, "\n"));
  return 1;
}

namespace {

// Replaces a run's id in the names of half-removed folders.
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
  return print(
      str(plural(before - removed, "step"), " of ", before, arguments.dry_run ? " would stay\n" : " stay\n"));
}

}  // namespace titan::cli

// Shared by the commands of `titan checkpoint`: the folder that a path means, the filter of tensors, and the
// progress line.

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <regex>
#include <system_error>

#include "cli/checkpoint/commands.h"
#include "cli/parser.h"
#include "cli/text.h"
#include "titan/core/error.h"

namespace titan::cli {

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
  parser.app
      .add_option("--tensors", pattern, "only tensors with a name in which this regular expression matches")
      ->type_name("REGEX");
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

namespace fs = std::filesystem;
using checkpoint::list_steps;

[[noreturn]] void refuse(std::string_view command, const std::string& problem) {
  throw ConfigError(str("titan checkpoint ", command, ": ", problem));
}

fs::path without_slash(const fs::path& path) { return path.has_filename() ? path : path.parent_path(); }

fs::path parent_of(const fs::path& path) {
  const fs::path parent = without_slash(path).parent_path();
  return parent.empty() ? fs::path(".") : parent;
}

bool is_step(const fs::path& folder) {
  return fs::exists(folder / checkpoint::kManifestName) ||
         without_slash(folder).filename().string().starts_with("step-");
}

// Also true for the folder of a run that hasn't saved a step yet.
bool holds_steps(const fs::path& folder) {
  return !list_steps(folder).empty() || !checkpoint::list_leftovers(folder).empty() ||
         fs::exists(folder / ".lock");
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

bool holds_model_only(const fs::path& folder) {
  if (fs::exists(folder / checkpoint::kManifestName)) return false;
  return fs::exists(folder / "model.safetensors") || fs::exists(folder / "model.safetensors.index.json");
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

StepHealth examine_step(const checkpoint::StepEntry& entry) {
  StepHealth health{.entry = entry, .model_only = holds_model_only(entry.path)};
  count_files(health);
  if (health.model_only) return health;
  try {
    if (entry.has_manifest) health.manifest = checkpoint::read_manifest(entry.path);
    health.problems = health.manifest ? checkpoint::quick_problems(entry.path, *health.manifest)
                                      : checkpoint::quick_problems(entry.path);
  } catch (const Error& error) {
    health.problems = {error.what()};
  }
  return health;
}

const char* StepHealth::state_word() const {
  if (model_only) return "model only";
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
  return written_text(entry.has_manifest ? entry.path / checkpoint::kManifestName : entry.path, utc);
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
  if (holds_model_only(given))
    refuse(command,
           str(given.string(), " holds only a model, without manifest and checksums; `titan checkpoint ",
               command, "` needs a checkpoint of a run's whole state"));
  if (is_step(given)) return without_slash(given);
  const std::string newest = newest_text(given);
  if (newest.empty()) refuse(command, str(given.string(), " is not a checkpoint: it has no manifest.json"));
  refuse(command, str(given.string(), " is a run's folder, not a step's", newest));
}

}  // namespace titan::cli

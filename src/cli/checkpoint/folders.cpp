#include <cstdio>
#include <exception>
#include <regex>
#include <system_error>

#include "cli/checkpoint/commands.h"
#include "cli/text.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"

namespace titan::cli {

namespace {

namespace fs = std::filesystem;
using checkpoint::list_steps;
using checkpoint::StepEntry;

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

// A run's folder before its first step, too.
bool holds_steps(const fs::path& folder) {
  return !list_steps(folder).empty() || !checkpoint::list_leftovers(folder).empty() ||
         fs::exists(folder / ".lock");
}

// One that can't be read, as lost+found, isn't what is looked for.
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

// The newest step in a folder or in the folders below it: "its newest step is ..."; empty: there is none.
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
  if (fs::exists(given)) refuse(command, str(given.string(), " is a file; a folder is wanted"));
  const fs::path parent = parent_of(given);
  const std::string newest = fs::is_directory(parent) ? newest_text(parent) : "";
  refuse(command, str("there is no folder ", given.string(),
                      newest.empty() ? "" : str(" in ", parent.string(), newest)));
}

}  // namespace

bool holds_model_only(const fs::path& folder) {
  if (fs::exists(folder / checkpoint::kManifestName)) return false;
  return fs::exists(folder / "model.safetensors") || fs::exists(folder / "model.safetensors.index.json");
}

fs::path steps_folder(const fs::path& given, std::string_view command) {
  check_folder(given, command);
  if (holds_steps(given)) return without_slash(given);
  if (is_step(given))
    refuse(command, str(given.string(), " is one step; what is wanted is the folder that holds it: ",
                        parent_of(given).string()));
  const std::vector<fs::path> found = folders_with_steps_in(given);
  if (found.size() == 1) return found.front();
  if (found.empty())
    refuse(command, str("there are no checkpoints in ", given.string(), " nor in a folder in it: no step-N"));
  std::string names;
  for (const fs::path& folder : found) names += " " + folder.string();
  refuse(command, str(given.string(), " has several folders of checkpoints:", names, "; name one"));
}

fs::path step_folder(const fs::path& given, std::string_view command) {
  check_folder(given, command);
  if (holds_model_only(given))
    refuse(command,
           str(given.string(), " holds a model alone, without manifest and checksums; `titan checkpoint ",
               command, "` wants a checkpoint of a run's whole state"));
  if (is_step(given)) return without_slash(given);
  const std::string newest = newest_text(given);
  if (newest.empty()) refuse(command, str(given.string(), " is no checkpoint: it has no manifest.json"));
  refuse(command, str(given.string(), " is no step's folder but a run's", newest));
}

std::function<bool(const std::string&)> tensor_filter(const std::string& pattern) {
  if (pattern.empty()) return [](const std::string&) { return true; };
  try {
    return [expression = std::regex(pattern)](const std::string& name) {
      return std::regex_search(name, expression);
    };
  } catch (const std::regex_error& error) {
    throw ConfigError(str("--tensors: '", pattern, "' is no regular expression: ", error.what()));
  }
}

// titan checkpoint prune: removes what keep_latest_k would.

namespace {

using namespace checkpoint;

// In the names of folders that are half removed, where a run's id stands otherwise.
constexpr const char* kRemover = "prune";

void show(const PruneArguments& arguments, const std::filesystem::path& folder) {
  for (const Leftover& leftover : list_leftovers(folder)) {
    if (lacks_successor(leftover, folder))
      std::printf("would bring back %s from %s, if no run writes here\n",
                  step_path(folder, leftover.step).c_str(), leftover.path.c_str());
    else
      std::printf("would remove %s, if no run writes here\n", leftover.path.c_str());
  }
  for (const StepEntry& step : steps_to_prune(list_steps(folder), arguments.keep))
    std::printf("would remove %s\n", step.path.c_str());
}

void prune(const PruneArguments& arguments, const std::filesystem::path& folder) {
  const FolderLock lock(folder);
  if (!lock.held() && !arguments.force)
    throw Error(str(folder.string(),
                    ": whether a run writes here can't be found out, as its file system has no "
                    "locks; --force, if none does"));
  clean_leftovers(folder, lock);
  for (const StepEntry& step : steps_to_prune(list_steps(folder), arguments.keep)) {
    remove_step(step, kRemover);
    std::printf("removed %s\n", step.path.c_str());
  }
}

}  // namespace

int checkpoint_prune(const Arguments& words) {
  const PruneArguments arguments = parse_prune_arguments(words);
  if (!arguments.help.empty()) return print(arguments.help);
  const auto folder = steps_folder(arguments.folder, "prune");
  const size_t before = list_steps(folder).size();
  arguments.dry_run ? show(arguments, folder) : prune(arguments, folder);
  const size_t removed = arguments.dry_run ? steps_to_prune(list_steps(folder), arguments.keep).size()
                                           : before - list_steps(folder).size();
  std::printf("%s of %zu %s\n", plural(static_cast<int64_t>(before - removed), "step").c_str(), before,
              arguments.dry_run ? "would stay" : "stay");
  return 0;
}

}  // namespace titan::cli

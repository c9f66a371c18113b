// [Note: what a kill leaves]
//
// A step gets its name by one rename. Where an older step has the name, the two names are exchanged at one
// instant, and the older one, now under the pending name, is removed:
//
//   step-N old   .tmp new      before
//   step-N new   .tmp old      after the exchange; a kill leaves a leftover
//
// Where the storage can't exchange, or the older one is to be kept:
//
//   step-N old                       .tmp new   before
//                .replaced old       .tmp new   neither has the name: clean_leftovers restores .replaced
//   step-N new   .replaced old                  a leftover
//
// A folder to be removed is renamed to .old first, which nothing restores, since it may be half empty. So
// .replaced is always whole.

#include <algorithm>

#include "checkpoint/format/stored_files.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::checkpoint {
namespace {

namespace fs = std::filesystem;
using detail::is_there;

fs::path removed_path(const fs::path& folder, int64_t step, const std::string& run_id) {
  return folder / str(".step-", step, ".", run_id, ".old");
}

fs::path replaced_path(const fs::path& folder, int64_t step, const std::string& run_id) {
  return folder / str(".step-", step, ".", run_id, ".replaced");
}

void rename_step(const fs::path& from, const fs::path& to) { storage_of(from).rename(from, to); }
void sync(const fs::path& folder) { storage_of(folder).sync(folder); }

// A folder that has lost its name already only takes space.
void remove_or_warn(const fs::path& folder) {
  try {
    storage_of(folder).remove(folder);
  } catch (const Error& error) {
    log::warning(error.what());
  }
}

void remove_as_old(const fs::path& path, const fs::path& removed) {
  Storage& storage = storage_of(path);
  storage.remove(removed);
  storage.rename(path, removed);
  storage.sync(path.parent_path());
  storage.remove(removed);
}

enum class Contents { Nothing, State, Model };

Contents contents_of(const fs::path& step) {
  if (detail::is_file(step / kManifestName)) return Contents::State;
  try {
    return storage_of(step).list(step).empty() ? Contents::Nothing : Contents::Model;
  } catch (const Error&) {
    return Contents::Model;
  }
}

// A state doesn't make a model of the same step superfluous, nor the reverse.
bool has_to_be_kept(const fs::path& old, const fs::path& successor) {
  return contents_of(old) != Contents::Nothing && contents_of(old) != contents_of(successor);
}

void keep_aside(const fs::path& old, const fs::path& target) {
  const char* kind = contents_of(old) == Contents::State ? ".state" : ".model";
  fs::path name = target;
  name += kind;
  for (int number = 2; is_there(name); ++number) {
    name = target;
    name += str(kind, ".", number);
  }
  rename_step(old, name);
  log::warning(str(target.string(), " was replaced by another kind of step; it is kept as ", name.string()));
}

// The successor has the name now.
void retire(const Leftover& replaced) {
  const fs::path folder = replaced.path.parent_path(), target = step_path(folder, replaced.step);
  try {
    has_to_be_kept(replaced.path, target)
        ? keep_aside(replaced.path, target)
        : remove_as_old(replaced.path, removed_path(folder, replaced.step, replaced.run_id));
  } catch (const Error& error) {
    log::warning(error.what());
  }
}

void replace_in_two_renames(const fs::path& pending, const fs::path& target, const fs::path& replaced) {
  rename_step(target, replaced);
  try {
    rename_step(pending, target);
  } catch (const Error&) {
    try {
      rename_step(replaced, target);
    } catch (const Error& error) {
      log::error(str(error.what(), "; the next run does it"));
    }
    throw;
  }
}

bool exchange_and_sync(const fs::path& pending, const fs::path& target) {
  Storage& storage = storage_of(target);
  if (!storage.exchange(pending, target)) return false;
  try {
    storage.sync(target.parent_path());  // before the older one is removed
  } catch (const Error&) {
    // The exchange may not last: what the caller removes as pending has to be the new one.
    storage.exchange(pending, target);
    throw;
  }
  return true;
}

void warn_of_leftovers(const fs::path& folder) {
  for (const Leftover& leftover : list_leftovers(folder))
    log::warning(str(leftover.path.string(), " belongs to a run that is working on it or was killed",
                     lacks_successor(leftover, folder)
                         ? str("; if it was killed, this is a whole step: rename it to ",
                               step_path(folder, leftover.step).string())
                         : ""));
}

bool is_good(const StepEntry& step) {
  if (!step.has_manifest) return false;
  try {
    const Manifest manifest = read_manifest(step.path);
    return manifest.finite && quick_problems(step.path, manifest).empty();
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

FolderLock::FolderLock(const fs::path& folder) : lock_(storage_of(folder).lock(folder)) {}

void commit_step(const fs::path& folder, int64_t step, const std::string& run_id) {
  const fs::path pending = pending_path(folder, step, run_id), target = step_path(folder, step);
  sync(pending);
  if (!is_there(target)) {
    rename_step(pending, target);
    return sync(folder);
  }
  // A kill after an exchange leaves something that is only removed.
  if (!has_to_be_kept(target, pending) && exchange_and_sync(pending, target)) return remove_or_warn(pending);
  const Leftover replaced{.step = step,
                          .run_id = run_id,
                          .path = replaced_path(folder, step, run_id),
                          .kind = LeftoverKind::Replaced};
  if (is_there(replaced.path)) remove_as_old(replaced.path, removed_path(folder, step, run_id));
  replace_in_two_renames(pending, target, replaced.path);
  sync(folder);
  retire(replaced);
}

void clean_leftovers(const fs::path& folder, const FolderLock& lock) {
  if (!lock.held()) return warn_of_leftovers(folder);
  for (const Leftover& leftover : list_leftovers(folder)) {
    if (!lacks_successor(leftover, folder)) continue;
    rename_step(leftover.path, step_path(folder, leftover.step));
    log::info(str("restored ", step_path(folder, leftover.step).string(),
                  ", which a run was replacing when it was killed"));
  }
  const std::vector<Leftover> leftovers = list_leftovers(folder);
  if (leftovers.empty()) return;
  sync(folder);
  for (const Leftover& leftover : leftovers) {
    log::info(str("removing ", leftover.path.string(), ", which a killed run left"));
    leftover.kind == LeftoverKind::Replaced ? retire(leftover) : remove_or_warn(leftover.path);
  }
}

std::vector<StepEntry> steps_to_prune(const std::vector<StepEntry>& steps, int64_t keep) {
  if (keep <= 0) return {};
  std::vector<StepEntry> newest_first;
  for (const StepEntry& step : steps)
    if (step.has_manifest) newest_first.push_back(step);
  std::sort(newest_first.begin(), newest_first.end(),
            [](const auto& a, const auto& b) { return a.step > b.step; });
  const auto good = std::find_if(newest_first.begin(), newest_first.end(), is_good);
  std::vector<StepEntry> pruned;
  for (auto step = newest_first.begin(); step != newest_first.end(); ++step)
    if (step - newest_first.begin() >= keep && step != good) pruned.push_back(*step);
  std::reverse(pruned.begin(), pruned.end());
  return pruned;
}

void remove_step(const StepEntry& step, const std::string& run_id) {
  remove_as_old(step.path, removed_path(step.path.parent_path(), step.step, run_id));
}

}  // namespace titan::checkpoint

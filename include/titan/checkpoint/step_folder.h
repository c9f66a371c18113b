#pragma once

// The folder of a run's checkpoints:
//
//   step-500/                 complete: it got this name by a rename, when everything in it was on disk
//   step-450.model/           a model alone that made way for a state of its step; step-450.state the reverse
//   .step-510.RUN.tmp/        being written by run RUN, or left there by a killed one
//   .step-420.RUN.replaced/   whole: it makes way for another step-420
//   .step-400.RUN.old/        being removed
//   .lock                     held (flock) by the run that writes here
//
// Names with a dot are nobody's checkpoint; the next run removes them (clean_leftovers).

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "titan/checkpoint/manifest.h"

namespace titan::checkpoint {

struct StepEntry {
  int64_t step = 0;
  std::filesystem::path path;
  bool has_manifest = false;  ///< else a model alone (model.safetensors or Hugging Face's form), or damaged
};

/// The steps in a folder, ascending; of names other than "step-<digits>" (as step_path writes them) and of
/// links nothing is said. A folder that isn't there has none; throws Error for one that can't be read.
std::vector<StepEntry> list_steps(const std::filesystem::path& folder);

enum class LeftoverKind { Pending, Replaced, Removed };  ///< ".tmp", ".replaced", ".old"

/// What a run left that was killed, or is working with: names with a dot of a step and a run.
struct Leftover {
  int64_t step = 0;
  std::string run_id;
  std::filesystem::path path;
  LeftoverKind kind = LeftoverKind::Pending;
};
/// By name.
std::vector<Leftover> list_leftovers(const std::filesystem::path& folder);

/// The newest step whose manifest reads well and whose files have the sizes it says. What keeps newer ones
/// from it is added to `problems`, a line each.
std::optional<int64_t> newest_complete(const std::filesystem::path& folder,
                                       std::vector<std::string>& problems);
/// Why a step can't be loaded, without reading its tensors; empty: nothing was found. A line each. Links
/// count as missing: what they lead to isn't the checkpoint's.
std::vector<std::string> quick_problems(const std::filesystem::path& step_folder);
/// The same of a folder whose manifest was read.
std::vector<std::string> quick_problems(const std::filesystem::path& step_folder, const Manifest& manifest);

std::filesystem::path step_path(const std::filesystem::path& folder, int64_t step);
std::filesystem::path pending_path(const std::filesystem::path& folder, int64_t step,
                                   const std::string& run_id);

/// The right to write to a folder; given back with the last handle, or with the process.
class FolderLock {
 public:
  /// Makes the folder. Throws Error that names host and process of the run that has it. Where the file system
  /// has no locks, a warning is logged and the lock is nobody's.
  explicit FolderLock(const std::filesystem::path& folder);
  /// Nobody else writes here: leftovers are nobody's.
  bool held() const;

 private:
  std::shared_ptr<const void> lock_;
};

/// What made way for something of another kind, by name: "step-7.model", "step-7.state.2".
std::vector<std::filesystem::path> list_put_aside(const std::filesystem::path& folder);

/// A replaced step whose successor never came: it has to get its name back.
bool lacks_successor(const Leftover& leftover, const std::filesystem::path& folder);

/// Brings back replaced steps whose successors never came, and removes what else killed runs left. Logs it.
/// Without the lock it only warns of each. Throws Error where a step can't be brought back.
void clean_leftovers(const std::filesystem::path& folder, const FolderLock& lock);

/// Syncs `pending` (all files of which are synced) and gives it its name. A step of that name is replaced,
/// and at no time is there neither, where the file system can exchange names; else clean_leftovers brings it
/// back. A model alone that a state replaces, or the reverse, is kept as list_put_aside tells. Throws Error.
void commit_step(const std::filesystem::path& folder, int64_t step, const std::string& run_id);

/// Which steps keeping the newest `keep` takes away: never the newest whose manifest says that all its
/// numbers are finite, never one without a manifest. Ascending.
std::vector<StepEntry> steps_to_prune(const std::vector<StepEntry>& steps, int64_t keep);
/// Renamed first, so that a half-removed folder isn't a step. Throws Error.
void remove_step(const StepEntry& step, const std::string& run_id);

}  // namespace titan::checkpoint

#pragma once

// Stored checkpoints: the folder that holds them, and reading one without a job.
//
// A run's folder:
//
//   step-500/                 complete: it got this name by a rename, after everything in it was on disk
//   step-450.model/           a model alone, replaced by a state of its step; step-450.state: the reverse
//   .step-510.RUN.tmp/        run RUN is writing it, or was killed while writing it
//   .step-420.RUN.replaced/   a whole step that another step-420 is replacing
//   .step-400.RUN.old/        being removed
//   .lock                     locked (flock) by the run that writes here
//
// Names with a leading dot are never checkpoints; the next run removes them (clean_leftovers).
//
//   std::vector<std::string> problems;
//   const auto newest = newest_complete(folder, problems);
//   if (newest) checkpointer.load(step_path(folder, *newest));
//   at::Tensor weight = SavedState(step_path(folder, 500)).read("model.norm.weight");
//   for (const Damage& damage : verify_step(step_path(folder, 500)).damages)
//     std::puts(to_string(damage).c_str());

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/checkpoint/manifest.h"
#include "titan/tensor/placement.h"

namespace titan::checkpoint {

// ---- listing

struct StepEntry {
  int64_t step = 0;
  std::filesystem::path path;
  bool has_manifest = false;  ///< false: a model alone (safetensors or Hugging Face's form), or damaged
};

std::filesystem::path step_path(const std::filesystem::path& folder, int64_t step);

/// The steps in a folder, ascending. Links and names other than "step-<digits>" (as step_path writes them)
/// are left out. A folder that doesn't exist has no steps; throws Error for one that can't be read.
std::vector<StepEntry> list_steps(const std::filesystem::path& folder);

/// The reasons why a step can't be loaded, one line each, found without reading its tensors. Links count as
/// missing, because their targets aren't part of the checkpoint.
std::vector<std::string> quick_problems(const std::filesystem::path& step_folder);
/// The same, with a manifest that has been read already.
std::vector<std::string> quick_problems(const std::filesystem::path& step_folder, const Manifest& manifest);

/// The manifest of a folder that holds a model alone (save_model), as a step's: each file is one "rank".
constexpr const char* kModelManifestName = "model_manifest.json";
/// Throws Error as read_manifest.
Manifest read_model_manifest(const std::filesystem::path& folder);
/// Whether a folder holds a model alone, in either form, with or without a manifest.
bool holds_model_alone(const std::filesystem::path& folder);

/// The newest step whose manifest is valid and whose files have the recorded sizes. The problems of newer
/// ones are added to `problems`, a line each.
std::optional<int64_t> newest_complete(const std::filesystem::path& folder,
                                       std::vector<std::string>& problems);

enum class LeftoverKind { Pending, Replaced, Removed };  ///< ".tmp", ".replaced", ".old"

/// A folder that a killed run left, or that a run is working on.
struct Leftover {
  int64_t step = 0;
  std::string run_id;
  std::filesystem::path path;
  LeftoverKind kind = LeftoverKind::Pending;
};

/// Sorted by name.
std::vector<Leftover> list_leftovers(const std::filesystem::path& folder);
/// Whether `leftover` is a replaced step whose successor never arrived: then it must get its name back.
bool lacks_successor(const Leftover& leftover, const std::filesystem::path& folder);
/// Folders that made way for another kind of step, sorted by name: "step-7.model", "step-7.state.2".
std::vector<std::filesystem::path> list_put_aside(const std::filesystem::path& folder);

// ---- reading a step: whole tensors or boxes of them, assembled from the files that hold the pieces; and
// checking every byte against its checksum

/// A handle, safe to use from several threads. A rank's file is opened when a piece of it is first needed;
/// when there are many, the most recently used ones stay open.
class SavedState {
 public:
  /// Reads the manifest, and no other file. Throws Error.
  explicit SavedState(const std::filesystem::path& step_folder);
  /// Takes a manifest that has been read already.
  SavedState(const std::filesystem::path& step_folder, Manifest manifest);

  const std::filesystem::path& folder() const;
  const Manifest& manifest() const;
  const StateTable& table() const { return manifest().table; }
  /// Throws Error, with the nearest names, when the checkpoint has no such tensor.
  const StateTensor& tensor(std::string_view name) const;

  /// Fills `target`, a CPU tensor of the saved dtype (any strides), with the elements in `box`. Opens only
  /// the files that hold pieces of them, checks each file's header against the manifest, and checks each
  /// block's checksum before copying it. Throws Error that names tensor and file.
  void read(std::string_view name, const Box& box, const at::Tensor& target) const;
  /// The whole tensor, in its dtype.
  at::Tensor read(std::string_view name) const;

  /// Bytes read from rank files, headers included, through all copies of this handle.
  int64_t bytes_read() const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

/// Boxes that tile a tensor, in the order of its elements, for reading a large one a part at a time. Each is
/// a contiguous run of at most `most_bytes`, or a single element. Empty for a tensor without elements.
std::vector<Box> slabs_of(const std::vector<int64_t>& shape, int64_t element_size, int64_t most_bytes);

struct Damage {
  std::filesystem::path file;
  std::string tensor;       ///< empty: the whole file, its header or the manifest
  int64_t first_block = 0;  ///< index in the tensor's piece in this file, in blocks of kBlockBytes
  int64_t num_blocks = 0;
  std::string what;
};

/// "FILE: tensor 'NAME', blocks 3 to 5: WHAT"
std::string to_string(const Damage& damage);

struct VerifyOptions {
  int num_threads = 1;
  /// Called by one thread at a time.
  std::function<void(int64_t bytes, int64_t total)> progress = {};
};

struct VerifyReport {
  std::vector<Damage> damages;  ///< by rank, then by place in the file; neighboring blocks are joined
  int64_t num_files = 0;        ///< named by the manifest
  int64_t num_tensors = 0;
  int64_t num_bytes = 0;  ///< tensors' bytes that were compared with their checksums
};

/// Reads the manifest, every header and every block of a step, or of a model alone that has a manifest, and
/// continues after damage. Finds: a manifest that was changed or belongs to another step; files that are
/// missing, shorter, longer, or belong to another rank, step or run; headers that contradict the manifest;
/// blocks whose bytes changed. Throws Error where the folder itself can't be read.
VerifyReport verify_step(const std::filesystem::path& step_folder, const VerifyOptions& options = {});

// ---- writing and removing

/// The exclusive right to write to a folder. Released with the last handle, or when the process ends.
class FolderLock {
 public:
  /// Makes the folder. Throws Error that names host and process of the run that holds the lock. Where the
  /// file system has no locks, logs a warning and holds nothing.
  explicit FolderLock(const std::filesystem::path& folder);
  /// Whether the folder is locked: then no other run writes here, and leftovers can be removed.
  bool held() const { return lock_ != nullptr; }

 private:
  std::shared_ptr<const void> lock_;
};

/// Restores replaced steps whose successors never arrived, and removes everything else that killed runs left;
/// logs each. Without the lock it only warns of each. Throws Error where a step can't be restored.
void clean_leftovers(const std::filesystem::path& folder, const FolderLock& lock);

/// The folder into which run `run_id` writes a step before commit_step renames it.
std::filesystem::path pending_path(const std::filesystem::path& folder, int64_t step,
                                   const std::string& run_id);

/// Syncs the pending folder (whose files are synced already) and renames it to step-N. A step that has the
/// name is replaced so that one of the two exists at any moment, where the file system can exchange names;
/// elsewhere clean_leftovers restores it after a kill. A model alone that a state replaces, or the reverse,
/// is kept (see list_put_aside). Throws Error.
void commit_step(const std::filesystem::path& folder, int64_t step, const std::string& run_id);

/// The steps to remove so that the newest `keep` remain (0: all), ascending. They never include the newest
/// one whose manifest says that all its numbers are finite, nor one without a manifest.
std::vector<StepEntry> steps_to_prune(const std::vector<StepEntry>& steps, int64_t keep);
/// Renames the folder first, so that a half-removed one isn't taken for a step. Throws Error.
void remove_step(const StepEntry& step, const std::string& run_id);

}  // namespace titan::checkpoint

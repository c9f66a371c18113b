#pragma once

// Saves and loads a job's whole state: the objects that were added to it, spread over any mesh.
//
// [Note: saving]
//   agree   all say whether anything is against this save
//   plan    which pieces of which tensors this rank writes (state_table.h): once, at the first save
//   stage   these pieces are copied to a buffer in host memory that is used again; behind it training goes on
//   write   each rank its own file into the pending folder, by threads, and syncs it
//   gather  what rank 0 has to know of each file (88 bytes) and the texts, over a tree
//   commit  rank 0 writes the manifest, syncs the folder and renames it; the verdict goes back over the tree
//
// Up to `plan` it is the caller's thread, from `write` on a thread and a process group of its own; `stage` is
// on either (AsyncMode).

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "titan/checkpoint/manifest.h"
#include "titan/dist/device_mesh.h"
#include "titan/dist/world.h"
#include "titan/tensor/dtensor.h"

namespace titan::checkpoint {

class PeerFolder;  // peer_folder.h

struct ObjectTensor {
  std::string name;        ///< within the object
  DTensor data;            ///< shares memory with the object: saved from it and loaded into it
  bool duplicate = false;  ///< another pipeline stage has it too, and saves it
};

struct ObjectState {
  std::vector<ObjectTensor> tensors;
  std::string text;  ///< what isn't tensors; of rank 0 unless there is `merge`
  /// From the texts of all ranks, by rank, the one that is saved. Called on rank 0, by another thread.
  std::function<std::string(const std::vector<std::string>&)> merge = {};
};

/// Something that a checkpoint holds. Both calls are made on every rank, by the thread that trains.
class Stateful {
 public:
  virtual ~Stateful() = default;
  /// As it is now. The tensors' names, shapes, dtypes and layouts are the same at every call.
  virtual ObjectState state() = 0;
  /// The tensors of state() hold the saved values now; `text` is what was saved beside them.
  virtual void loaded(const std::string& text) = 0;
};

/// Where a save stands. Tests fail at each; see SaveOptions::on_phase.
enum class SavePhase {
  Agree,  ///< on the thread that trains, before all say whether anything is against this save
  Plan,   ///< likewise, at the first save only
  Stage,  ///< before the copy of what is in host memory; from here on what fails is a failed write
  MakeFolder,
  WriteFile,   ///< before the first byte
  WriteChunk,  ///< behind each chunk
  SyncFile,
  Gather,
  WriteManifest,
  Commit,
  Verdict,
  Prune,
  CopyPiece,  ///< of peer checkpoints, between Gather and WriteManifest: behind each piece of the copies
};
const char* to_string(SavePhase phase);

enum class AsyncMode {
  Disabled,  ///< save() returns when the checkpoint is complete; older ones are removed behind it
  Copied,    ///< save() returns behind `stage`
  Staged,    ///< save() returns at once; wait_for_staging() has to come before the state changes
};

struct SaveOptions {
  std::filesystem::path folder;
  bool read_only = false;  ///< only load(): the folder needn't be writable, nor nobody else's
  AsyncMode async = AsyncMode::Disabled;
  int64_t keep_latest = 0;      ///< 0: all
  bool skip_when_busy = false;  ///< a save that comes while another is under way is skipped, not delayed
  bool stop_on_failure = true;  ///< else a failed save is logged, and training goes on, unless a rank is lost
  std::chrono::seconds timeout{1800};  ///< of waiting for another rank, or for the save before
  int num_threads = 2;                 ///< that write
  std::string config = {};             ///< Manifest::config
  std::function<void(SavePhase)> on_phase = {};
  /// Set: generations are saved there, in memory of the hosts ([Note: peer checkpoints] in peer_folder.h).
  /// `folder` and `keep_latest` aren't used, a save that can't begin is always skipped, and with
  /// stop_on_failure = false training goes on whatever fails, ranks that are lost included.
  std::shared_ptr<PeerFolder> peers = {};
};

struct LoadOptions {
  std::vector<std::string> exclude = {};   ///< keys of objects that keep what they have
  std::vector<std::string> only = {};      ///< keys of the objects that are loaded; empty: all
  std::vector<std::string> optional = {};  ///< keys of objects that the checkpoint or this run may lack
  bool convert_dtypes = false;             ///< where the saved dtype isn't the object's; else an error
  /// Called on every rank before a tensor changes, with the ranks whose files this one is going to read, to
  /// bring them into the folder. Throws on all ranks or on none.
  std::function<void(const Manifest&, const std::set<int64_t>&)> bring_files = {};
};

/// What a save of this rank takes.
struct SaveSize {
  int64_t file_bytes = 0;    ///< about: the header's length depends on names
  int64_t staged_bytes = 0;  ///< of host memory, for the copy that training doesn't wait beyond
};

/// Of a Checkpointer's saves, those that ended.
struct SaveCounts {
  int64_t complete = 0, failed = 0, skipped = 0;
};

/// What was loaded.
struct Loaded {
  Manifest manifest;
  int64_t num_bytes_read = 0;  ///< by this rank
  double seconds = 0;
};

class Checkpointer {
 public:
  /// `pipeline`: ranks with different tensors (Meshes::pp), may be empty. Collective over the world. Unless
  /// it is read_only, makes the folder, locks it and removes leftovers (rank 0), and makes sure that all
  /// ranks see the same folder: throws Error that names the ranks (and hosts) that don't.
  Checkpointer(const dist::World& world, const DeviceMesh& pipeline, SaveOptions options);
  /// Waits for a save under way.
  ~Checkpointer();
  Checkpointer(Checkpointer&&) noexcept;

  /// `object` has to live as long. Keys: letters, digits, underscores. Before the first save or load.
  void add(const std::string& key, Stateful& object);

  /// Plans the saves, as the first one else does. Collective over the world.
  SaveSize plan();
  /// Collective over the world. False: skipped, as another save is under way, or failed before anything was
  /// written. Throws Error on every rank when an earlier save failed in the background, or this one before
  /// it is written or (Disabled) at all, unless failures are only logged.
  bool save(int64_t step);
  /// Returns when the state may change again.
  void wait_for_staging();
  /// Throws what went wrong in the background. Ranks come to know it one after the other: where they are to
  /// throw at one place, they agree by failed().
  void check();
  /// Whether check() throws.
  bool failed() const;
  /// Whether it throws as ranks are out of step, which some may never come to know.
  bool lost_ranks() const;
  /// Returns when nothing is under way; throws as check does.
  void finish();
  /// Why the last save that ended isn't complete, also where failures are only logged; empty: it is.
  std::string last_failure() const;
  SaveCounts counts() const;

  /// From a step's folder, complete or throwing Error (with all that is missing, additional, or of another
  /// shape or dtype, before any tensor was changed). Collective over the world.
  Loaded load(const std::filesystem::path& step_folder, const LoadOptions& options = {});

  /// How long save() and wait_for_staging() held up the caller since the last call of this.
  double take_blocked_seconds();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace titan::checkpoint

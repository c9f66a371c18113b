#pragma once

// Saves and loads the whole state of a job: the objects that were added, spread over any mesh.
//
//   Checkpointer checkpoints(world, {}, {.folder = "checkpoints", .async = AsyncMode::Staged});
//   checkpoints.add("model", model_state);          // a Stateful
//   checkpoints.wait_for_staging(); optimizer.step(); checkpoints.save(step);
//
// [Note: saving]
//   agree   all ranks report whether anything prevents this save
//   plan    at the first save only: which pieces of which tensors this rank writes (manifest.h)
//   stage   copies these pieces to a reused buffer in host memory; then training continues
//   write   each rank writes its own file into the pending folder, with several threads, and syncs it
//   gather  sends each file's record (88 bytes) and the texts to rank 0, over a tree of ranks
//   commit  rank 0 writes the manifest, syncs the folder and renames it; the verdict goes back over the tree
//
// `agree` and `plan` run on the caller's thread; `write` and all later phases run on a background thread with
// its own process group; `stage` runs on either (AsyncMode).

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "titan/checkpoint/manifest.h"
#include "titan/dist/device_mesh.h"
#include "titan/dist/world.h"
#include "titan/tensor/dtensor.h"

namespace titan::checkpoint {

class PeerFolder;  // src/checkpoint/peer/peer_folder.h

struct ObjectTensor {
  std::string name;        ///< within the object
  DTensor data;            ///< shares memory with the object: saved from it and loaded into it
  bool duplicate = false;  ///< another pipeline stage has it too, and saves it
};

struct ObjectState {
  std::vector<ObjectTensor> tensors;
  std::string text;  ///< everything else; rank 0's is saved unless there is `merge`
  /// Makes the saved text from the texts of all ranks, by rank. Called on rank 0, on another thread.
  std::function<std::string(const std::vector<std::string>&)> merge = {};
};

/// Something that a checkpoint holds. Both functions are called on every rank, on the training thread.
class Stateful {
 public:
  virtual ~Stateful() = default;
  /// The current state. The tensors' names, shapes, dtypes and layouts are the same at every call. Also called without a
  /// save, to learn how much memory saves need.
  virtual ObjectState state() = 0;
  /// Called before a load changes anything. Throws Error, and changes nothing itself, if the object can't
  /// continue with `text`, the saved text.
  virtual void check(const std::string&) const {}
  /// Called after a load: the tensors of state() now hold the saved values. `text` is the saved text.
  virtual void loaded(const std::string& text) = 0;
};

/// The point that a save has reached. Tests inject failures at each; see SaveOptions::on_phase.
enum class SavePhase {
  Agree,  ///< on the training thread, before the ranks report whether anything prevents this save
  Plan,   ///< likewise, at the first save only
  Stage,  ///< before the copy from host memory; from here on a failure is a failed write
  MakeFolder,
  WriteFile,   ///< before the first byte
  WriteChunk,  ///< after each chunk
  SyncFile,
  Gather,
  WriteManifest,
  Commit,
  Verdict,
  Prune,
  CopyPiece,  ///< peer checkpoints only, between Gather and WriteManifest: after each piece of the copies
};
const char* to_string(SavePhase phase);

enum class AsyncMode {
  Disabled,  ///< save() returns when the checkpoint is complete; older ones are removed afterwards
  Copied,    ///< save() returns after `stage`
  Staged,    ///< save() returns at once; call wait_for_staging() before the state changes
};

struct SaveOptions {
  std::filesystem::path folder;  ///< local, or in a registered storage: "s3:/bucket/run" (storage.h)
  bool read_only = false;        ///< only load(): the folder may be read-only, or another run's
  AsyncMode async = AsyncMode::Disabled;
  int64_t keep_latest = 0;  ///< number of checkpoints to keep; 0: all
  /// Skip a save while another is in progress, instead of waiting for it.
  bool skip_when_busy = false;
  /// False: a failed save is logged and training continues, unless a rank is lost.
  bool stop_on_failure = true;
  std::chrono::seconds timeout{1800};  ///< for waiting for another rank, or for the previous save
  int num_threads = 2;                 ///< writer threads
  std::string config = {};             ///< Manifest::config
  std::function<void(SavePhase)> on_phase = {};
  /// Set: saves go to the hosts' memory ([Note: peer checkpoints] in peer_folder.h). `folder` and
  /// `keep_latest` are ignored, a save that can't begin is skipped, and with stop_on_failure = false training
  /// continues whatever fails, even when ranks are lost.
  std::shared_ptr<PeerFolder> peers = {};
};

struct LoadOptions {
  std::vector<std::string> exclude = {};   ///< keys of objects that stay as they are
  std::vector<std::string> only = {};      ///< keys of the objects to load; empty: all
  std::vector<std::string> optional = {};  ///< keys of objects that the checkpoint or this run may lack
  bool convert_dtypes = false;             ///< convert where the saved dtype differs; else that is an error
  /// Called on every rank before a tensor changes, with the ranks whose files this rank will read, to bring
  /// them into the folder. Throws on all ranks or on none.
  std::function<void(const Manifest&, const std::set<int64_t>&)> bring_files = {};
};

/// The space that a save of this rank takes.
struct SaveSize {
  int64_t file_bytes = 0;    ///< approximate: the header's length depends on the checksums
  int64_t staged_bytes = 0;  ///< host memory for the copy
};

/// Counts of the saves that have ended.
struct SaveCounts {
  int64_t complete = 0, failed = 0, skipped = 0;
};

struct Loaded {
  Manifest manifest;
  int64_t num_bytes_read = 0;  ///< by this rank
  double seconds = 0;
};

class Checkpointer {
 public:
  /// `pipeline`: ranks with different tensors (Meshes::pp); may be empty. Collective over the world. Unless
  /// it is read_only, makes the folder, locks it and removes leftovers (rank 0), and checks that all ranks
  /// see the same folder: throws Error that names the ranks and hosts that don't.
  Checkpointer(const dist::World& world, const DeviceMesh& pipeline, SaveOptions options);
  /// Waits for a save in progress.
  ~Checkpointer();
  Checkpointer(Checkpointer&&) noexcept;

  /// Call it before the first save or load. `object` must outlive the checkpointer. A key consists of
  /// letters, digits and underscores.
  void add(const std::string& key, Stateful& object);

  /// Plans the saves now instead of at the first one. If a GPU will copy, begins to lock the pages of the
  /// memory that it copies to, on another thread. Collective over the world.
  SaveSize plan();
  /// Collective over the world. Returns false when the save was skipped because another is in progress, or
  /// failed before anything was written. Unless failures are only logged, throws Error on every rank when an
  /// earlier save failed in the background, and when this one fails before writing or (Disabled) at any
  /// point.
  bool save(int64_t step);
  /// Returns when the state may change again.
  void wait_for_staging();
  /// Throws Error if a save failed in the background. Ranks learn of it at different times: to throw at the
  /// same point on all of them, let them agree on failed() first.
  void check();
  /// Whether check() throws.
  bool failed() const;
  /// Whether check() throws because ranks are out of step. Some ranks may never learn of that.
  bool lost_ranks() const;
  /// Returns when nothing is in progress; throws as check does.
  void finish();
  /// Why the last save to end is incomplete, even where failures are only logged; empty: it is complete.
  std::string last_failure() const;
  SaveCounts counts() const;

  /// Loads a step's folder completely, or throws Error before any tensor has changed, listing everything that
  /// is missing, unexpected, or of another shape or dtype. Collective over the world.
  Loaded load(const std::filesystem::path& step_folder, const LoadOptions& options = {});

  /// How long save() and wait_for_staging() blocked the caller since the last call of this function.
  double take_blocked_seconds();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace titan::checkpoint

#pragma once

// Saves staged pieces on the background thread of every rank. Both kinds of saving write the rank's own file
// and report it to rank 0. Then StepWriter completes one folder that all ranks share, and PeerWriter folders
// in the hosts' memory.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/save/rank_tree.h"
#include "checkpoint/save/save_plan.h"
#include "titan/checkpoint/checkpointer.h"
#include "titan/checkpoint/step_folder.h"

namespace titan::checkpoint::detail {

/// The input of one save.
struct SaveJob {
  int64_t step = 0;
  std::shared_ptr<Staging> staging;
  std::string staging_failure;  // why `staging` is incomplete; empty: it is complete
  StateTable table;
  std::map<std::string, std::string> texts;  // this rank's, by key
  using Merge = std::function<std::string(const std::vector<std::string>&)>;
  std::map<std::string, Merge> merges;  // by key of an object whose texts are merged: the same on all ranks
  int64_t num_threads = 0;              // Manifest::num_threads
};

/// How a save ended, the same on every rank unless ranks are lost.
struct SaveOutcome {
  std::string failure;  // empty: complete
  bool lost = false;    // the ranks are out of step
};

/// A rank's report to rank 0 about its part of a checkpoint.
struct SaveReport {
  int64_t step = 0;
  std::string failure;  // empty: the file is complete and on disk
  FileRecord file;
  bool finite = true;
  int64_t num_threads = 0;
  std::string disk_full;           // why its disk takes no more, if that is the failure; `file` has the size
  int64_t free_bytes = -1;         // on its disk before the file was written; -1: unknown
  std::vector<std::string> texts;  // the texts to merge, in the order of the objects' keys
  static void fields(auto& wire, auto& self) {
    wire(self.step, self.failure, self.file.num_bytes, self.file.header_digest, self.finite, self.num_threads,
         self.disk_full, self.free_bytes, self.texts);
  }
};

/// The failure of a save whose files share a disk that is full: "there is no room in FOLDER: the files of 2
/// ranks need 16.5 MB, and 512 kB was free before: WHY". Empty: a rank failed for another reason, or none did.
std::string disk_full_text(const std::filesystem::path& folder, const std::vector<SaveReport>& reports);

class SaveWriter {
 public:
  SaveWriter(SaveOptions options, std::string run_id, RankTree tree);
  virtual ~SaveWriter() = default;

  /// Called before write(), by the thread that starts it: from here on phase() describes this save.
  void begin() { phase_ = SavePhase::MakeFolder; }
  /// Collective. Called by one thread at a time. Doesn't throw.
  virtual SaveOutcome write(const SaveJob& job) = 0;
  /// Removes checkpoints that are too old after a complete save. Doesn't throw.
  virtual void prune(int64_t step) = 0;
  /// Why this rank can't begin a save now; empty: it can. Callable by any thread.
  virtual std::string busy_reason() const { return ""; }
  /// The current phase of write(); for other threads.
  SavePhase phase() const { return phase_.load(); }

 protected:
  void enter(SavePhase phase);
  /// As enter(), without the callback.
  void set_phase(SavePhase phase) { phase_ = phase; }
  /// Writes this rank's own file to the pending folder. Failures are in the report.
  SaveReport write_file(const SaveJob& job);
  /// On rank 0: the verdict of `decide` on all ranks' reports, or the reason if a rank failed or `decide`
  /// throws.
  Verdict conclude(const SaveJob& job, const std::vector<Answer>& answers,
                   const std::function<Verdict(const std::vector<SaveReport>&)>& decide) const;
  Manifest manifest_of(const SaveJob& job, const std::vector<SaveReport>& reports) const;
  /// "checkpoint of step 500: 1.61 GB in 1.92 s (0.84 GB/s)"
  static std::string summary(const char* what, int64_t step, int64_t num_bytes, double seconds);
  bool is_root() const { return tree_.rank() == 0; }

  SaveOptions options_;
  std::string run_id_;
  RankTree tree_;

 private:
  void write_pieces(const SaveJob& job, SaveReport& report);

  std::atomic<SavePhase> phase_{SavePhase::MakeFolder};
};

/// [Note: writing a step] Each rank writes its file into the pending folder and reports; when all have, rank
/// 0 writes the manifest and renames the folder; all ranks learn the outcome. A failure before the rename
/// leaves no checkpoint, and a failure after it can't undo it. docs/checkpoint_protocol.md lists the effect
/// of a failure in each phase.
class StepWriter : public SaveWriter {
 public:
  using SaveWriter::SaveWriter;
  SaveOutcome write(const SaveJob& job) override;
  /// Only rank 0 removes anything.
  void prune(int64_t step) override;

 private:
  void complete(const SaveJob& job, const std::vector<SaveReport>& reports);
};

// ---- opening a folder, and checking that its path names the same folder on all hosts

struct OpenedFolder {
  std::optional<FolderLock> lock;  // on rank 0, if the folder is written to
  std::string run_id;              // the same on all ranks
  std::vector<std::string> hosts;  // by rank
};

/// Collective. Rank 0 makes and locks the folder, removes leftovers, and writes a file there that all other
/// ranks must see within a minute, or within half of `timeout` (the group's) if that is less. Throws the same
/// Error on all ranks: what rank 0 couldn't do, or which ranks don't see its file.
OpenedFolder open_shared_folder(dist::Group& group, const std::filesystem::path& folder,
                                std::chrono::milliseconds timeout);

/// Collective. Touches no file: a folder that is only read may belong to another run.
OpenedFolder open_to_read(dist::Group& group);

}  // namespace titan::checkpoint::detail

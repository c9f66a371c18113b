#pragma once

// What rank 0 has to know of a rank's part of a checkpoint.

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/save/rank_tree.h"
#include "checkpoint/save/staging.h"
#include "titan/checkpoint/checkpointer.h"
#include "titan/checkpoint/manifest.h"

namespace titan::checkpoint::detail {

struct SaveReport {
  int64_t step = 0;
  std::string failure;  // empty: the file is complete and on disk
  FileRecord file;
  bool finite = true;
  int64_t num_threads = 0;
  std::vector<std::string> texts;  // of the objects that merge theirs, in the order of their keys
};

std::string to_bytes(const SaveReport& report);
/// Throws Error.
SaveReport parse_report(const std::string& bytes);

// What the background thread of every rank does with staged pieces. Both ways of saving write the rank's own
// file and tell rank 0 of it; what follows is StepWriter's (a folder that all ranks share) or PeerWriter's
// (folders in the hosts' memory).

/// What one save writes.
struct SaveJob {
  int64_t step = 0;
  std::shared_ptr<Staging> staging;
  std::string staging_failure;  // why it doesn't hold what it should
  StateTable table;
  std::map<std::string, std::string> texts;  // of this rank, by key
  using Merge = std::function<std::string(const std::vector<std::string>&)>;
  std::map<std::string, Merge> merges;  // of the objects whose texts are merged: the same keys on all ranks
  int64_t num_threads = 0;              // Manifest::num_threads
};

/// How a save ended, the same on every rank but where ranks are lost.
struct SaveOutcome {
  std::string failure;  // empty: complete
  bool lost = false;    // the ranks are out of step
};

class SaveWriter {
 public:
  SaveWriter(SaveOptions options, std::string run_id, RankTree tree);
  virtual ~SaveWriter() = default;

  /// Before write(), by the thread that starts it: from here on phase() is of this save.
  void begin() { phase_ = SavePhase::MakeFolder; }
  /// Collective, by one thread at a time. Doesn't throw.
  virtual SaveOutcome write(const SaveJob& job) = 0;
  /// Removes what is too old behind a complete save. Doesn't throw.
  virtual void prune(int64_t step) = 0;
  /// Why this rank can't begin a save just now; empty: it can. By any thread.
  virtual std::string why_not() const { return ""; }
  /// Where write() is now; for other threads.
  SavePhase phase() const { return phase_.load(); }

 protected:
  void enter(SavePhase phase);
  /// As enter(), but nobody is told.
  void phase_is(SavePhase phase) { phase_ = phase; }
  /// This rank's own file, in the pending folder. What goes wrong stands in the report.
  SaveReport write_file(const SaveJob& job);
  /// Rank 0's: the files that the ranks told of, or in `verdict` what keeps them from being a checkpoint.
  std::vector<SaveReport> reports_of(const SaveJob& job, const std::vector<Answer>& answers,
                                     Verdict& verdict) const;
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

// [Note: a checkpoint comes to be], on the background thread of every rank: each writes its file into the
// pending folder and reports; rank 0, when all have, writes the manifest and gives the folder its name; all
// hear how it went. Whatever fails before the rename leaves no checkpoint, and what is behind it can't take
// it back. docs/checkpoint_protocol.md goes through who may fail where.

class StepWriter : public SaveWriter {
 public:
  using SaveWriter::SaveWriter;

  SaveOutcome write(const SaveJob& job) override;
  /// On rank 0.
  void prune(int64_t step) override;

 private:
  Verdict conclude(const SaveJob& job, const std::vector<Answer>& answers);
  void complete(const SaveJob& job, const std::vector<SaveReport>& reports);
};

}  // namespace titan::checkpoint::detail

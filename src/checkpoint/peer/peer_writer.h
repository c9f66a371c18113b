#pragma once

// [Note: writing a generation], on the background thread of every rank:
//
//   write    its own file, into .step-N.RUN.tmp of its place
//   gather   rank 0 learns of all files, makes the manifest, and sends it to all
//   copy     the file is sent to the next place, in pieces, while the previous place's arrives
//   agree    all have what they should
//   commit   each place's leader writes the manifest and renames the folder
//   agree    all places have it
//   prune    the leaders remove the previous generation
//
// A place's folder is renamed when every file is at all places where it should be, and the previous
// generation is removed when all places have renamed theirs: whatever is lost in between, all files of one of
// the two survive the loss of any one place.
//
// [Note: copies that take too long] Messages that nobody waits for any more are still in transit: whatever is
// sent next over their connections arrives after them. So copies have a group of their own, which carries
// nothing else, and a generation's copies are begun only when those before have ended on every rank. A rank
// that gives its copies up says so with its next piece, and an abandoned thread receives what still arrives;
// then new copies can be made. Copies that take too long end the generation and nothing else.

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "checkpoint/peer/peer_folder.h"
#include "checkpoint/save/save_writer.h"
#include "titan/dist/collectives.h"

namespace titan::checkpoint::detail {

// ---- files that are sent from rank to rank, a piece of each at a time

struct FileTransfer {
  std::filesystem::path path;  ///< read by the sender, made by the receiver
  int64_t num_bytes = 0;       ///< the same at both ends
  int peer = 0;                ///< of the group
  bool sends = false;
};

/// Host memory for each transfer, and what a step's own messages may have to wait for.
constexpr int64_t kTransferBytes = int64_t{4} << 20;

struct TransferOptions {
  std::function<void()> progress = {};  ///< called after each round of pieces
  /// Set by another thread: this rank stops sending with the next piece. Null: never.
  std::shared_ptr<const std::atomic<bool>> ends_early = {};
};

/// All transfers at once; both ends have to make this call with theirs. A file that this rank can't read or
/// write doesn't hold up the others: each transfer continues until its sender has sent everything, or says
/// that the rest won't come. Returns why files are unusable; empty: all went well. A file that couldn't be
/// written whole is removed. Throws Error where a peer is lost: then the group can't be used any more.
std::string transfer_files(dist::Group& group, const std::vector<FileTransfer>& transfers,
                           const TransferOptions& options = {});

// ---- generations

class PeerWriter : public SaveWriter {
 public:
  /// `copies`: a group that nobody else uses; null where there is one place.
  PeerWriter(SaveOptions options, std::string run_id, RankTree tree, std::shared_ptr<dist::Group> copies);
  SaveOutcome write(const SaveJob& job) override;
  void prune(int64_t step) override;
  /// Copies of an earlier generation are still in transit, or lost their connections.
  std::string busy_reason() const override;

 private:
  struct Round;

  Verdict manifest_or_failure(const SaveJob& job, const std::vector<Answer>& answers) const;
  /// Runs `part`; all ranks' problems together.
  Verdict on_all(const std::function<void()>& part);
  /// This rank's transfers of a generation, while all others make theirs. Throws Error where they aren't
  /// complete within the time limit: then they are given up.
  void copy_files(const Manifest& manifest);
  void commit(const Manifest& manifest);
  SaveOutcome give_up(int64_t step, const Verdict& verdict) const;

  std::shared_ptr<dist::Group> copies_;
  mutable std::mutex mutex_;
  std::shared_ptr<Round> last_round_;
};

}  // namespace titan::checkpoint::detail

#pragma once

// [Note: writing a generation], on the background thread of every rank:
//
//   write    each rank writes its own file into .step-N.RUN.tmp of its place
//   gather   rank 0 learns of all files, makes the manifest, and sends it to all
//   copy     each rank sends its file to the next place, in pieces, while files of the previous place arrive
//   agree    all copies are complete
//   commit   each place's leader writes the manifest and renames the folder
//   agree    all places have renamed their folders
//   prune    the leaders remove the previous generation
//
// A place's folder is renamed when all copies of all files are complete, and the previous generation is
// removed when all places have renamed theirs. So at any time all files of one of the two generations survive
// the loss of any one place.
//
// [Note: copies that take too long] Messages that no rank waits for any more stay in transit, and messages
// sent later over the same connections arrive after them. So copies have their own group, which carries
// nothing else, and a generation's copies begin only when the previous ones have ended on every rank. A rank
// that gives up its copies says so in its next piece, and an abandoned thread receives the pieces that still
// arrive; then new copies can be made. Copies that take too long end only their generation.

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
  int peer = 0;                ///< rank in the group
  bool sends = false;
};

/// Host memory for each transfer. A step's own messages may have to wait for this many bytes.
constexpr int64_t kTransferBytes = int64_t{4} << 20;

struct TransferOptions {
  std::function<void()> progress = {};  ///< called after each round of pieces
  /// Set by another thread: this rank stops sending with the next piece. Null: never.
  std::shared_ptr<const std::atomic<bool>> ends_early = {};
};

/// Makes all transfers at the same time; both ends of a transfer have to make this call. A file that this
/// rank can't read or write doesn't delay the others: each transfer continues until its sender has sent
/// everything, or says that it stops. Returns why files are unusable; empty: all are complete. A file that
/// couldn't be written whole is removed. Throws Error if a peer is lost: then the group can't be used any
/// more.
std::string transfer_files(dist::Group& group, const std::vector<FileTransfer>& transfers,
                           const TransferOptions& options = {});

// ---- generations

class PeerWriter : public SaveWriter {
 public:
  /// `copies`: a group that nothing else uses; null if there is one place.
  PeerWriter(SaveOptions options, std::string run_id, RankTree tree, std::shared_ptr<dist::Group> copies);
  SaveOutcome write(const SaveJob& job) override;
  void prune(int64_t step) override;
  /// Not empty while copies of an earlier generation are in transit, and after they lost their connections.
  std::string busy_reason() const override;

 private:
  struct Round;

  Verdict manifest_or_failure(const SaveJob& job, const std::vector<Answer>& answers) const;
  /// Collective: runs `part`, and returns all ranks' problems.
  Verdict on_all(const std::function<void()>& part);
  /// Makes this rank's transfers of a generation while all others make theirs. If they aren't complete within
  /// the time limit, gives them up and throws Error.
  void copy_files(const Manifest& manifest);
  void commit(const Manifest& manifest);
  SaveOutcome give_up(int64_t step, const Verdict& verdict) const;

  std::shared_ptr<dist::Group> copies_;
  mutable std::mutex mutex_;
  std::shared_ptr<Round> last_round_;
};

}  // namespace titan::checkpoint::detail

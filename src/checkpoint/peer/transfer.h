#pragma once

// Files that go from rank to rank, a piece of each at a time.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "titan/dist/collectives.h"

namespace titan::checkpoint::detail {

struct FileTransfer {
  std::filesystem::path path;  ///< read when it is sent, made when it is received
  int64_t num_bytes = 0;       ///< the same at both ends
  int peer = 0;                ///< of the group
  bool sends = false;
};

/// So much host memory for each transfer, and what a step's own messages may have to wait for.
constexpr int64_t kTransferBytes = int64_t{4} << 20;

struct TransferOptions {
  std::function<void()> progress = {};  ///< called behind each round of pieces
  /// Set by another thread: what this rank sends ends with the next piece. Null: nobody does.
  std::shared_ptr<const std::atomic<bool>> ends_early = {};
};

/// All transfers at once; both ends have to come here with theirs. What this rank can't read or write doesn't
/// keep the others from theirs: each file goes on until its sender has sent all, or says that the rest
/// doesn't come. Why files are of no use is returned; empty: all went well. A file that couldn't be written
/// whole is removed. Throws Error where a peer is lost: the group is of no use any more.
std::string transfer_files(dist::Group& group, const std::vector<FileTransfer>& transfers,
                           const TransferOptions& options = {});

// [Note: copies that take too long]
// Messages that nobody waits for any more stay on their way: whatever is sent next over their connections
// comes behind them. So copies have a group of their own, in which nothing else is said, and a generation's
// are begun only where those before have ended on every rank. A rank that gives its copies up says so with
// its next piece, and a thread that is left to itself takes what still comes; then others can be made.

/// The copies of one generation after the other.
class PeerCopies {
 public:
  /// `group`: nobody else's.
  explicit PeerCopies(std::shared_ptr<dist::Group> group) : group_(std::move(group)) {}

  /// This rank's transfers of a generation, while all others make theirs; only where nobody's why_not() said
  /// anything. Throws Error where they aren't made within `limit`, or not whole: they are given up.
  void make(int64_t step, const std::vector<FileTransfer>& transfers, std::chrono::milliseconds limit,
            const std::function<void()>& progress = {});
  /// Why no copies can be made: earlier ones are still on their way, or lost their connections; empty: they
  /// can. May be called by any thread.
  std::string why_not() const;

 private:
  struct Round;

  std::shared_ptr<dist::Group> group_;
  mutable std::mutex mutex_;
  std::shared_ptr<Round> last_;
};

}  // namespace titan::checkpoint::detail

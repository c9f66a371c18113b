#pragma once

// [Note: copies that take too long]
// Messages that nobody waits for any more stay on their way: whatever is sent next over their connections
// comes behind them. So copies have a group of their own, in which nothing else is said, and a generation's
// are begun only where those before have ended on every rank. A rank that gives its copies up says so with
// its next piece, and a thread that is left to itself takes what still comes; then others can be made.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "peer_transfer.h"
#include "titan/dist/collectives.h"

namespace titan::checkpoint::detail {

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

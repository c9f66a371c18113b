#pragma once

// Files that go from rank to rank, a piece of each at a time.

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
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

}  // namespace titan::checkpoint::detail

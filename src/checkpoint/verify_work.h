#pragma once

// [Note: verifying]
// Threads take spans of a few blocks from one queue, in the order of the files: so the disk is read forwards,
// and one large file keeps all threads busy. A file is open from its first span to its last.

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "titan/checkpoint/rank_file.h"
#include "titan/checkpoint/verify.h"

namespace titan::checkpoint::detail {

/// A rank's file whose header was believed, and a descriptor by which its blocks are read without belief.
class FileUnderCheck;

/// Some blocks of a tensor's piece.
struct BlockSpan {
  std::shared_ptr<const FileUnderCheck> file;
  std::string tensor;
  const RankFile::Entry* entry = nullptr;  ///< of `file`
  int64_t first_block = 0;
  int64_t num_blocks = 0;
};

class VerifyWork {
 public:
  /// The arguments have to live as long.
  VerifyWork(const std::filesystem::path& step_folder, const Manifest& manifest,
             const VerifyOptions& options);

  /// Takes spans until none is left. By any number of threads.
  void run();
  /// When all are back.
  VerifyReport report();

 private:
  struct Found {
    int64_t rank = 0;
    int64_t offset = 0;  // in the file
    Damage damage;
  };

  std::optional<BlockSpan> next();
  void open_next();
  void check(const BlockSpan& span, std::vector<std::byte>& buffer);
  void add(Found found);
  void count(int64_t bytes);

  const std::filesystem::path& folder_;
  const Manifest& manifest_;
  const VerifyOptions& options_;
  const int64_t total_;
  std::mutex mutex_;
  int64_t rank_ = 0;
  std::deque<BlockSpan> spans_;
  std::vector<Found> found_;
  int64_t done_ = 0;
};

/// A message about a file, for where its path stands already.
std::string without_path(std::string message, const std::filesystem::path& path);

}  // namespace titan::checkpoint::detail

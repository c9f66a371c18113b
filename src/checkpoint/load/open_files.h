#pragma once

// The rank files of a checkpoint that is being read.

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "checkpoint/format/rank_file.h"

namespace titan::checkpoint::detail {

/// Opens a rank's file in a step's folder. Throws Error as RankFile does, and for anything but a regular file
/// of that folder: a link may point anywhere.
RankFile open_rank_file(const std::filesystem::path& step_folder, const Manifest& manifest, int64_t rank);

/// Opens files when they are first needed, and closes the least recently used one when `most_open` are open:
/// a process has a limited number of descriptors, and a checkpoint may have thousands of files.
class OpenFiles {
 public:
  OpenFiles(std::filesystem::path step_folder, size_t most_open)
      : folder_(std::move(step_folder)), most_open_(most_open) {}

  /// The file stays open as long as the pointer lives.
  std::shared_ptr<const RankFile> use(const Manifest& manifest, int64_t rank);
  /// From all files, including those that were closed.
  int64_t bytes_read() const;

 private:
  struct Slot {
    std::mutex opening;
    std::optional<RankFile> file;
    uint64_t last_use = 0;
  };

  std::shared_ptr<Slot> take_slot(int64_t rank);
  void close_oldest();

  const std::filesystem::path folder_;
  const size_t most_open_;
  mutable std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<Slot>> slots_;  // one that is in use has other owners
  uint64_t num_uses_ = 0;
  int64_t bytes_of_closed_ = 0;
};

}  // namespace titan::checkpoint::detail

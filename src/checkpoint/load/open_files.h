#pragma once

// The rank files of a checkpoint that is being read.

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/format/rank_file.h"

namespace titan::checkpoint::detail {

/// Opens a rank's file in a step's folder. Throws Error as RankFile does, and for anything but a regular file
/// of that folder: a link may point anywhere.
RankFile open_rank_file(const std::filesystem::path& step_folder, const Manifest& manifest, int64_t rank);

/// Throws Error unless the header's entry is what the manifest says of this piece.
void check_entry(const RankFile& file, const StateTensor& tensor, const Box& box);
/// Where a header's entries contradict the manifest: a line for each tensor.
std::map<std::string, std::string> header_problems(const RankFile& file, const StateTable& table,
                                                   int64_t rank);

/// Opens files when they are first needed, and closes the least recently used one when `most_open` are open:
/// a process has a limited number of descriptors, and a checkpoint may have thousands of files.
class OpenFiles {
 public:
  OpenFiles(std::filesystem::path step_folder, size_t most_open)
      : folder_(std::move(step_folder)), most_open_(most_open) {}

 private:
  struct Slot {
    std::mutex opening;
    std::optional<RankFile> file;
    int num_users = 0;
    uint64_t last_use = 0;
  };

 public:
  /// Keeps the file open as long as it lives.
  class Lease {
   public:
    Lease(OpenFiles& owner, Slot& slot) : owner_(owner), slot_(slot) {}
    ~Lease() { owner_.release(slot_); }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    const RankFile& file() const { return *slot_.file; }

   private:
    OpenFiles& owner_;
    Slot& slot_;
  };

  Lease use(const Manifest& manifest, int64_t rank);
  /// From all files, including those that were closed.
  int64_t bytes_read() const;

 private:
  Slot& take_slot(int64_t rank);
  void release(Slot& slot);
  void close_oldest();

  const std::filesystem::path folder_;
  const size_t most_open_;
  mutable std::mutex mutex_;
  std::map<int64_t, Slot> slots_;
  uint64_t num_uses_ = 0;
  int64_t bytes_of_closed_ = 0;
};

}  // namespace titan::checkpoint::detail

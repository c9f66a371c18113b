#pragma once

// Checks that all ranks, on whatever hosts, mean the same folder by its path.

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "titan/checkpoint/step_folder.h"
#include "titan/dist/collectives.h"

namespace titan::checkpoint::detail {

/// 32 hexadecimal digits.
std::string random_id();
/// "rank 3 (host)"
std::string rank_on(size_t rank, const std::string& host);

struct OpenedFolder {
  std::optional<FolderLock> lock;  // rank 0's, of a folder that is written to
  std::string run_id;              // the same on all ranks
  std::vector<std::string> hosts;  // by rank
};

/// Collective. Rank 0 makes and locks the folder, removes leftovers, and writes a file there that all other
/// ranks have to see within a minute or half of `timeout`, the group's. Throws the same Error on all ranks:
/// what rank 0 couldn't do, or which ranks don't see its file.
OpenedFolder open_shared_folder(dist::Group& group, const std::filesystem::path& folder,
                                std::chrono::milliseconds timeout);

/// Collective. Reads, makes and removes nothing: a folder that is only read from may be another run's.
OpenedFolder open_to_read(dist::Group& group);

}  // namespace titan::checkpoint::detail

#pragma once

// Whether the ranks, on whatever hosts, mean the same folder by its name.

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "titan/checkpoint/step_folder.h"
#include "titan/dist/collectives.h"

namespace titan::checkpoint::detail {

std::string own_host();
/// 32 hexadecimal digits.
std::string random_id();

struct OpenedFolder {
  std::optional<FolderLock> lock;  // rank 0's, of a folder that is written to
  std::string run_id;              // the same on all ranks
  std::vector<std::string> hosts;  // by rank
};

/// Collective. Rank 0 makes and locks the folder, removes leftovers, and puts a file there that all others
/// have to see, within a minute or half of `timeout`, the group's. Throws the same Error on all ranks: what
/// rank 0 couldn't do, or who doesn't see its file.
OpenedFolder open_shared_folder(dist::Group& group, const std::filesystem::path& folder,
                                std::chrono::milliseconds timeout);
/// Collective. Nothing is looked at, made or removed: a folder that is only read from may be another run's.
OpenedFolder open_to_read(dist::Group& group);

}  // namespace titan::checkpoint::detail

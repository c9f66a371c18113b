#pragma once

// A generation as a step on disk, when no rank is there any more that could save it. It is of the same files,
// so it only has to be copied.

#include <filesystem>
#include <functional>
#include <optional>

#include "titan/checkpoint/peer_folder.h"

namespace titan::checkpoint::detail {

/// In a peer folder: the path of the folder that its run saves in.
inline constexpr const char* kDiskName = ".disk";

/// Copies the newest generation of which this place has all files to the run's disk, with every checksum
/// compared, unless a complete step there is as new; then, and where there is no generation, nullopt. Throws
/// Error where `folder` can't be read; all else is in the state's problem, and has left the disk as it was.
std::optional<LeftState> save_newest_generation(const std::filesystem::path& folder,
                                                const std::function<bool()>& gives_up);

}  // namespace titan::checkpoint::detail

#pragma once

// What tells a run from others that save elsewhere, also behind a copy of its folder: a file in it.

#include <filesystem>
#include <string>

namespace titan::train {

struct RunMark {
  std::string run;     ///< of this run alone: 32 hexadecimal digits
  std::string folder;  ///< where it saves now, for comparing and for people: path and inode
};

/// Of the run that saves in `folder`, from the file there, which is made where there is none. A run keeps its
/// mark when its folder is renamed, or seen by another path from another host, while a copy of the folder
/// gets a mark of its own. Throws Error.
RunMark run_mark(const std::filesystem::path& folder);

}  // namespace titan::train

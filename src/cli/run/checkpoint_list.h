#pragma once

// The checkpoints of a run, as far as can be told without reading their tensors.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace titan::cli {

struct CheckpointRow {
  int64_t step = 0;
  int64_t num_bytes = 0;
  std::string written = {};  ///< local time
  std::string state = {};    ///< "complete", "model only", or what is wrong
  bool usable = true;
};

/// Ascending; none where the folder isn't there.
std::vector<CheckpointRow> list_checkpoints(const std::filesystem::path& folder);

/// The last of them; the others aren't looked into.
std::optional<CheckpointRow> newest_checkpoint(const std::filesystem::path& folder);

}  // namespace titan::cli

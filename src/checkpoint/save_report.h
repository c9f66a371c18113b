#pragma once

// What rank 0 has to know of a rank's part of a checkpoint.

#include <cstdint>
#include <string>
#include <vector>

#include "titan/checkpoint/manifest.h"

namespace titan::checkpoint::detail {

struct SaveReport {
  int64_t step = 0;
  std::string failure;  // empty: the file is complete and on disk
  FileRecord file;
  bool finite = true;
  int64_t num_threads = 0;
  std::vector<std::string> texts;  // of the objects that merge theirs, in the order of their keys
};

std::string to_bytes(const SaveReport& report);
/// Throws Error.
SaveReport parse_report(const std::string& bytes);

}  // namespace titan::checkpoint::detail

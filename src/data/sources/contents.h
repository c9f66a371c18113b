#pragma once

// The contents of files, judged by their names and first bytes.

#include <string>
#include <vector>

#include "data/sources/files.h"

namespace titan::data {

/// Throws ConfigError with the files that are plainly something other than what the data set `kind` ("text",
/// "jsonl", "tokens") reads. Looks at all names, and at the first bytes of at most some hundred files.
void check_contents(const std::string& kind, const std::vector<FileEntry>& files);

}  // namespace titan::data

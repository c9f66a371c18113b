#pragma once

// A JSON file from strangers, as its leaves.

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "titan/checkpoint/hugging_face.h"

namespace titan::detail {

/// Keys and array positions from the root to a value.
using JsonPath = std::vector<std::string>;
using JsonLeaves = std::map<JsonPath, HfValue>;

/// Reads a JSON object by events: no tree is built, nesting is limited to 64 and the file to `max_bytes`,
/// checked before it is read. Throws ConfigError that names the file for what isn't valid, for a key given
/// twice (readers would differ in which counts) and for control characters in a key.
JsonLeaves read_json_leaves(const std::filesystem::path& path, size_t max_bytes);

}  // namespace titan::detail

#pragma once

// A JSON file from strangers, as its leaves.

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "titan/checkpoint/hugging_face.h"

namespace titan::detail {

/// Keys and array positions from the root to a value.
using JsonPath = std::vector<std::string>;
using JsonLeaves = std::map<JsonPath, HfValue>;

/// Reads a JSON object by events: no tree is built, nesting is limited to 64, the text to `max_bytes`, and
/// the paths of all leaves together to some times the text (those of a list's elements repeat its key).
/// Throws ConfigError that names `file` for what isn't valid, for a key given twice (readers would differ in
/// which counts) and for control characters in a key.
JsonLeaves parse_json_leaves(std::string_view text, size_t max_bytes, const std::string& file);

}  // namespace titan::detail

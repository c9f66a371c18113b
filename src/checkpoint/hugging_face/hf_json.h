#pragma once

// Parses the JSON files of a Hugging Face folder, which may come from anyone, and makes their values.

#include <map>
#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

#include "titan/checkpoint/hugging_face.h"

namespace titan::detail {

/// The key of config.json for the longest sequence.
inline constexpr const char* kLongestSequence = "max_position_embeddings";

// Both throw ConfigError that names `file` and the problem.

/// config.json, at most 1 MiB.
HfConfig parse_hf_config(std::string_view text, const std::string& file);

/// `weight_map` of model.safetensors.index.json, at most 100 MB: tensor to file. A file must have a plain
/// name in the folder itself; HfFolder checks whether it is a link.
std::map<std::string, std::string> parse_hf_index(std::string_view text, const std::string& file);

nlohmann::json json_of(const HfValue& value);

}  // namespace titan::detail

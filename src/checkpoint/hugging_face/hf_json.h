#pragma once

// The JSON files of a Hugging Face folder, as text that may come from anyone.

#include <map>
#include <string>
#include <string_view>

#include "titan/checkpoint/hugging_face.h"

namespace titan::detail {

// Both throw ConfigError that names `file` and what is wrong with it.

/// config.json, at most 1 MiB.
HfConfig parse_hf_config(std::string_view text, const std::string& file);

/// `weight_map` of model.safetensors.index.json, at most 100 MB: tensor to file. A file has a plain name in
/// the folder itself; whether it is a link is checked elsewhere.
std::map<std::string, std::string> parse_hf_index(std::string_view text, const std::string& file);

}  // namespace titan::detail

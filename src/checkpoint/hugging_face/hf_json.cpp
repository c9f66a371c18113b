#include "checkpoint/hugging_face/hf_json.h"

#include <nlohmann/json.hpp>

#include "core/json.h"
#include "titan/core/error.h"

namespace titan {
namespace {

constexpr size_t kMaxConfigBytes = 1 << 20;
constexpr size_t kMaxIndexBytes = 100'000'000;

bool is_plain_name(const std::string& name) {
  return name.find_first_of(std::string_view("/\0", 2)) == std::string::npos && !name.starts_with('.') &&
         name.ends_with(".safetensors");
}

std::string dotted(const JsonPath& keys) {
  std::string text;
  for (const std::string& key : keys) text += (text.empty() ? "" : ".") + key;
  return text;
}

}  // namespace

std::string to_text(const HfValue& value) {
  const auto text = [](const auto& held) {
    if constexpr (std::is_same_v<decltype(held), const std::monostate&>) {
      return std::string("null");
    } else {
      return nlohmann::json(held).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    }
  };
  return std::visit(text, value);
}

HfConfig detail::parse_hf_config(std::string_view text, const std::string& file) {
  HfConfig config;
  for (const auto& [keys, value] : read_json_leaves(text, kMaxConfigBytes, file)) {
    // {"a.b": 1} and {"a": {"b": 1}} would be one.
    if (!config.emplace(dotted(keys), value).second)
      throw ConfigError(str(file, ": '", dotted(keys), "' occurs twice"));
  }
  return config;
}

std::map<std::string, std::string> detail::parse_hf_index(std::string_view text, const std::string& file) {
  std::map<std::string, std::string> map;
  std::vector<std::string> problems;
  for (const auto& [keys, value] : read_json_leaves(text, kMaxIndexBytes, file)) {
    if (keys[0] != "weight_map") continue;
    const auto* shard = std::get_if<std::string>(&value);
    if (keys.size() == 2 && shard && is_plain_name(*shard)) {
      map.emplace(keys[1], *shard);
    } else {
      problems.push_back(str(file, ": weight_map: '", keys.size() > 1 ? keys[1] : "", "' is in ",
                             to_text(value), "; allowed: the name of a .safetensors file in the folder"));
    }
  }
  if (problems.empty() && map.empty()) problems.push_back(str(file, ": weight_map names no tensors"));
  if (!problems.empty()) throw ConfigError(std::move(problems));
  return map;
}

}  // namespace titan

#include "cli/checkpoint/text_difference.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include <nlohmann/json.hpp>

#include "cli/run_record.h"
#include "core/shallow_json.h"
#include "titan/core/error.h"

namespace titan::cli {

namespace {

using nlohmann::json;
using Values = std::map<std::string, std::string>;

constexpr size_t kMostValueChars = 60;

std::optional<json> parse(const std::string& text) {
  json value = parse_shallow_json(text);
  if (!value.is_object() && !value.is_array()) return std::nullopt;
  return value;
}

Values leaves_of(const json& value) {
  Values leaves;
  if (value.empty()) return leaves;
  const json flat = value.flatten();  // items() refers to it
  for (const auto& [path, leaf] : flat.items())
    leaves[path] = leaf.dump(-1, ' ', false, json::error_handler_t::replace);
  return leaves;
}

std::string shortened(const std::string& text) {
  return text.size() > kMostValueChars ? text.substr(0, kMostValueChars) + "..." : text;
}

std::vector<std::string> differences(const Values& a, const Values& b) {
  std::set<std::string> keys;
  for (const Values& values : {a, b})
    for (const auto& [key, value] : values) keys.insert(key);
  const auto value = [](const Values& values, const std::string& key) {
    const auto found = values.find(key);
    return found == values.end() ? std::string("unset") : shortened(found->second);
  };
  std::vector<std::string> lines;
  for (const std::string& key : keys) {
    const auto in_a = a.find(key), in_b = b.find(key);
    if (in_a != a.end() && in_b != b.end() && in_a->second == in_b->second) continue;
    lines.push_back(str(key, ": ", value(a, key), " | ", value(b, key)));
  }
  return lines;
}

std::string parting(const std::string& a, const std::string& b) {
  const auto [at_a, at_b] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
  return str(a.size(), " bytes | ", b.size(), " bytes, which part at byte ", at_a - a.begin());
}

}  // namespace

std::vector<std::string> config_differences(const std::string& a, const std::string& b) {
  Values in_a = settings_of(a), in_b = settings_of(b);
  for (Values* values : {&in_a, &in_b}) values->erase("job.dump_folder");
  return differences(in_a, in_b);
}

std::vector<std::string> text_differences(const std::string& a, const std::string& b) {
  if (a == b) return {};
  const auto in_a = parse(a), in_b = parse(b);
  if (!in_a || !in_b) return {parting(a, b)};
  return differences(leaves_of(*in_a), leaves_of(*in_b));  // none: written in another way
}

}  // namespace titan::cli

#include "config/differences.h"

#include <algorithm>
#include <set>
#include <sstream>

#include "titan/core/error.h"

namespace titan::config {

namespace {

using Settings = std::map<std::string, std::string>;

std::string value_in(const Settings& settings, const std::string& key) {
  const auto found = settings.find(key);
  return found == settings.end() ? "unset" : found->second;
}

}  // namespace

// Reads print_toml's lines without a schema, so that runs of models unknown to this program can be compared.
std::map<std::string, std::string> printed_settings(const std::string& toml) {
  Settings settings;
  std::istringstream lines(toml);
  std::string line, section;
  while (std::getline(lines, line)) {
    if (line.empty() || line[0] == '#') continue;
    if (line[0] == '[') {
      section = line.substr(1, line.find(']') - 1);
    } else if (const size_t equals = line.find(" = "); equals != std::string::npos) {
      settings[section + "." + line.substr(0, equals)] = line.substr(equals + 3);
    }
  }
  return settings;
}

std::vector<std::string> setting_differences(const std::string& a, const std::string& b,
                                             const std::vector<std::string>& other_than) {
  const Settings in_a = printed_settings(a), in_b = printed_settings(b);
  std::set<std::string> keys;
  for (const Settings* settings : {&in_a, &in_b})
    for (const auto& [key, value] : *settings) keys.insert(key);
  std::vector<std::string> lines;
  for (const std::string& key : keys) {
    const std::string table = key.substr(0, key.find('.'));
    if (std::find(other_than.begin(), other_than.end(), table) != other_than.end()) continue;
    if (value_in(in_a, key) != value_in(in_b, key))
      lines.push_back(str(key, ": ", value_in(in_a, key), " | ", value_in(in_b, key)));
  }
  return lines;
}

}  // namespace titan::config

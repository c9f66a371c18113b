#include "data/fingerprint.h"

#include <algorithm>

#include "titan/core/error.h"

namespace titan::data {
namespace {

constexpr std::string_view kBetweenParts = "; ";
constexpr std::string_view kAfterName = " = ";

std::vector<std::pair<std::string, std::string>> split_fingerprint(std::string_view text) {
  std::vector<std::pair<std::string, std::string>> parts;
  while (!text.empty()) {
    std::string_view part = text.substr(0, text.find(kBetweenParts));
    text.remove_prefix(std::min(text.size(), part.size() + kBetweenParts.size()));
    const size_t name = std::min(part.size(), part.find(kAfterName));
    parts.emplace_back(part.substr(0, name), part.substr(std::min(part.size(), name + kAfterName.size())));
  }
  return parts;
}

std::string difference_of(const std::string& name, const std::string& before, const std::string& now) {
  return str(name, " was '", before, "', is '", now, "'");
}

}  // namespace

std::string join_fingerprint(const std::vector<std::pair<std::string, std::string>>& parts) {
  std::string joined;
  for (const auto& [name, value] : parts)
    joined += str(joined.empty() ? "" : kBetweenParts, name, kAfterName, value);
  return joined;
}

std::string fingerprint_difference(const std::string& before, const std::string& now) {
  const auto old_parts = split_fingerprint(before), new_parts = split_fingerprint(now);
  bool alike = old_parts.size() == new_parts.size();
  std::string difference;
  for (size_t i = 0; alike && i < old_parts.size(); ++i) {
    alike = old_parts[i].first == new_parts[i].first;
    if (old_parts[i].second == new_parts[i].second) continue;
    difference += str(difference.empty() ? "" : kBetweenParts,
                      difference_of(old_parts[i].first, old_parts[i].second, new_parts[i].second));
  }
  return alike ? difference : difference_of("the whole", before, now);
}

}  // namespace titan::data

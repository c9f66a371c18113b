#include "titan/config/origins.h"

#include "titan/core/error.h"

namespace titan::config {

std::string Origins::origin_of(std::string_view name) const {
  auto found = given_.find(name);
  if (found == given_.end()) return "default";
  return found->second.place.empty() ? "command line" : found->second.place;
}

std::string Origins::problem(std::string_view name, std::string_view what) const {
  if (auto given = given_.find(name); given != given_.end()) {
    const auto& [place, shown] = given->second;
    return str(place.empty() ? "--" : place + ": ", name, shown.empty() ? "" : " = ", shown, ": ", what);
  }
  auto found = defaults_.find(name);
  if (found == defaults_.end()) return str(name, ": ", what);
  return str(name, " = ", found->second, " (default): ", what);
}

}  // namespace titan::config

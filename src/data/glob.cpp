#include "glob.h"

#include <fnmatch.h>

#include <set>

namespace titan::data {
namespace {

namespace fs = std::filesystem;
using Components = std::vector<std::string>;

bool is_hidden(const fs::path& path) { return path.filename().string().starts_with('.'); }

// Adds to `found` what `folder` holds for the components from `index` on.
void expand(const fs::path& folder, const Components& components, size_t index, std::set<fs::path>& found) {
  if (index == components.size()) {
    if (fs::exists(folder)) found.insert(folder);
    return;
  }
  const std::string& component = components[index];
  if (!is_glob(component)) return expand(folder / component, components, index + 1, found);
  bool any_depth = component == "**";
  if (any_depth) expand(folder, components, index + 1, found);
  std::error_code error;  // a folder that isn't one, or may not be listed, has no matches
  for (const auto& entry : fs::directory_iterator(folder.empty() ? "." : folder, error)) {
    fs::path inner = folder / entry.path().filename();
    if (any_depth && entry.is_directory(error) && !is_hidden(inner)) expand(inner, components, index, found);
    if (!any_depth && fnmatch(component.c_str(), entry.path().filename().c_str(), FNM_PERIOD) == 0)
      expand(inner, components, index + 1, found);
  }
}

}  // namespace

bool is_glob(const std::string& path) { return path.find_first_of("*?[") != path.npos; }

fs::path glob_base(const std::string& pattern) {
  fs::path base;
  for (const auto& component : fs::path(pattern)) {
    if (is_glob(component.string())) break;
    base /= component;
  }
  return base;
}

std::vector<fs::path> expand_glob(const std::string& pattern) {
  fs::path base = glob_base(pattern);
  Components components;
  bool below_base = false;
  for (const auto& component : fs::path(pattern)) {
    below_base = below_base || is_glob(component.string());
    if (below_base) components.push_back(component.string());
  }
  std::set<fs::path> found;
  expand(base, components, 0, found);
  return {found.begin(), found.end()};
}

}  // namespace titan::data

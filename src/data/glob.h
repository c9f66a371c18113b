#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace titan::data {

/// Whether `path` holds `*`, `?` or `[`.
bool is_glob(const std::string& path);

/// The part of a glob before its first component with a wildcard.
std::filesystem::path glob_base(const std::string& pattern);

/// The files and folders that match: `*`, `?` and `[...]` within a component (not a leading dot), `**` for
/// any number of folders. Each once, in no particular order.
std::vector<std::filesystem::path> expand_glob(const std::string& pattern);

}  // namespace titan::data

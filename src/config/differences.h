#pragma once

// Compares resolved configs as print_toml writes them.

#include <map>
#include <string>
#include <vector>

namespace titan::config {

/// Full name -> value as TOML.
std::map<std::string, std::string> printed_settings(const std::string& toml);

/// Lines like "training.steps: 10 | 20", with "unset" for a missing setting. Skips the tables in
/// `other_than`.
std::vector<std::string> setting_differences(const std::string& a, const std::string& b,
                                             const std::vector<std::string>& other_than = {});

}  // namespace titan::config

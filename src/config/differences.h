#pragma once

// Resolved configs as print_toml writes them, compared.

#include <map>
#include <string>
#include <vector>

namespace titan::config {

/// Full name -> value as TOML.
std::map<std::string, std::string> printed_settings(const std::string& toml);

/// "training.steps: 10 | 20", a line each; "unset" where one has no such setting. Of the tables in
/// `other_than` nothing is said.
std::vector<std::string> setting_differences(const std::string& a, const std::string& b,
                                             const std::vector<std::string>& other_than = {});

}  // namespace titan::config

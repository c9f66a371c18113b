#pragma once

// Fingerprints of several named parts, so that a message can name the part that differs.

#include <string>
#include <utility>
#include <vector>

namespace titan::data {

/// "source = ...; tokenizer = ...". Names contain no "=" or ";". If a value does, a difference is shown
/// whole.
std::string join_fingerprint(const std::vector<std::pair<std::string, std::string>>& parts);

/// How two fingerprints differ: "order was 'shuffled by 3', is 'shuffled by 4'; ...". If they have different
/// parts, they are shown whole.
std::string fingerprint_difference(const std::string& before, const std::string& now);

}  // namespace titan::data

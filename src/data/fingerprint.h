#pragma once

// Fingerprints of several named parts, so that a difference can be told by the part's name.

#include <string>
#include <utility>
#include <vector>

namespace titan::data {

/// "source = ...; tokenizer = ...". Names hold no "=" or ";"; where a value does, a difference is shown
/// whole.
std::string join_fingerprint(const std::vector<std::pair<std::string, std::string>>& parts);

/// What differs between two such strings: "order was 'shuffled by 3', is 'shuffled by 4'; ...". Strings that
/// aren't made of the same parts are shown whole.
std::string fingerprint_difference(const std::string& before, const std::string& now);

}  // namespace titan::data

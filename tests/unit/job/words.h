#pragma once

// Command lines of tests.

#include <string>
#include <vector>

namespace titan::train {

using Words = std::vector<std::string>;

inline Words operator+(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

}  // namespace titan::train

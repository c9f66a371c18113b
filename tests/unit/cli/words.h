#pragma once

// Command lines of tests.

#include <string>
#include <vector>

#include "titan/core/error.h"

namespace titan::cli {

using Words = std::vector<std::string>;

inline Words operator+(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

/// What `parse` says is wrong with `words`.
template <class Parse>
std::string problem_of(const Parse& parse, const Words& words) {
  try {
    parse(words);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no problem";
}

}  // namespace titan::cli

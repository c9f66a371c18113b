#pragma once

// Command lines of tests.

#include <string>

#include "cli/commands.h"
#include "titan/core/error.h"

namespace titan::cli {

using Words = Arguments;

inline Words operator+(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

/// The help text that `words` ask for; "" if they don't.
template <class Parse>
std::string help_of(const Parse& parse, const Words& words) {
  try {
    parse(words);
  } catch (const HelpText& help) {
    return help.text;
  }
  return "";
}

/// The problem that `parse` finds in `words`.
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

#pragma once

// CLI11 as our commands use it: a usage line in our words, and ConfigError for what isn't understood.

#include <string>
#include <vector>

#include <CLI/CLI.hpp>

namespace titan::cli {

/// One command's line.
class Parser {
 public:
  /// `name`: "titan train". `usage`: without the word "usage".
  Parser(std::string name, std::string usage, std::string explanation);

  /// Returns the help text if it was asked for. Throws ConfigError.
  std::string parse(const std::vector<std::string>& words);

  [[noreturn]] void refuse(const std::string& problem) const;
  [[noreturn]] void refuse_option(const std::string& word) const;

  CLI::App app;

 private:
  std::string name_;
};

}  // namespace titan::cli

#pragma once

// CLI11 with our usage line, and with ConfigError for errors.

#include <string>
#include <vector>

#include <CLI/CLI.hpp>

namespace titan::cli {

/// Parses the command line of one command.
class Parser {
 public:
  /// `name`: "titan train". `usage`: without the word "usage".
  Parser(std::string name, std::string usage, std::string explanation);

  /// Returns the help text if the words ask for it. Throws ConfigError.
  std::string parse(const std::vector<std::string>& words);

  [[noreturn]] void refuse(const std::string& problem) const;
  [[noreturn]] void refuse_option(const std::string& word) const;

  CLI::App app;

 private:
  std::string name_;
};

}  // namespace titan::cli

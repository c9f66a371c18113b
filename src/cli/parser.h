#pragma once

// CLI11 with our usage line, and with ConfigError for errors.

#include <filesystem>
#include <string>

#include <CLI/CLI.hpp>

#include "cli/commands.h"

namespace titan::cli {

/// The largest number of ranks that a command takes.
inline constexpr int kMostRanks = 65536;

/// Parses the command line of one command. Values that are bound to options must outlive it.
class Parser {
 public:
  /// `name`: "titan train". `usage`: the words after the name. `notes` ends the help text.
  Parser(std::string name, const std::string& usage, std::string notes);

  /// A required argument without a name, such as a folder.
  void path(const std::string& name, std::filesystem::path& value, const std::string& text) {
    this->value(name, value, "PATH", text)->required();
  }
  void flag(const std::string& name, bool& value, const std::string& text) {
    app.add_flag(name, value, text);
  }
  /// An option with a value, which the help calls `type`.
  template <class Value>
  CLI::Option* value(const std::string& name, Value& value, const std::string& type,
                     const std::string& text) {
    return app.add_option(name, value, text)->type_name(type);
  }
  void file(const std::string& name, std::filesystem::path& value, const std::string& text) {
    this->value(name, value, "FILE", text);
  }
  /// A number from `least` to `most`.
  template <class Number>
  CLI::Option* number(const std::string& name, Number& value, const CLI::Range& range,
                      const std::string& text, const std::string& type = "N") {
    return this->value(name, value, type, text)->check(CLI::Range(range).description(""));
  }

  /// Throws HelpText if the words ask for help, and ConfigError if they are wrong.
  void parse(const Arguments& words);

  [[noreturn]] void refuse(const std::string& problem) const;
  [[noreturn]] void refuse_option(const std::string& word) const;

  CLI::App app;

 private:
  std::string name_;
};

}  // namespace titan::cli

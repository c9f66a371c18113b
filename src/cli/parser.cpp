#include "cli/parser.h"

#include <memory>

#include "titan/core/error.h"

namespace titan::cli {

namespace {

/// CLI11's help, with a usage line that is more specific than "[OPTIONS]".
class Format : public CLI::Formatter {
 public:
  explicit Format(std::string usage) : usage_(std::move(usage)) { column_width(22); }
  std::string make_usage(const CLI::App*, std::string) const override { return "usage: " + usage_ + "\n"; }
  /// Only the value's name: the descriptions say which options exclude each other.
  std::string make_option_opts(const CLI::Option* option) const override {
    const std::string value = option->get_type_name();
    return (value.empty() ? "" : " " + value) + (option->get_required() ? " REQUIRED" : "");
  }

 private:
  std::string usage_;
};

}  // namespace

Parser::Parser(std::string name, std::string usage, std::string explanation) : name_(std::move(name)) {
  app.formatter(std::make_shared<Format>(std::move(usage)));
  app.footer(std::move(explanation));
  app.set_help_flag("-h,--help", "this text");
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
}

std::string Parser::parse(const std::vector<std::string>& words) {
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));  // CLI11 takes them from the back
  } catch (const CLI::CallForHelp&) {
    return app.help();
  } catch (const CLI::ParseError& error) {
    refuse(error.what());
  }
  return "";
}

void Parser::refuse(const std::string& problem) const {
  throw ConfigError(str(name_, ": ", problem, " (see ", name_, " --help)"));
}

void Parser::refuse_option(const std::string& word) const {
  std::vector<std::string> known;
  for (const CLI::Option* option : app.get_options())
    for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
  const auto near = nearest_names(word.substr(0, word.find('=')), known, 1);
  refuse(str("unknown option '", word, "'", near.empty() ? "" : str("; did you mean '", near.front(), "'?")));
}

}  // namespace titan::cli

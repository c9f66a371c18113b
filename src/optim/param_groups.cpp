#include "param_groups.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <regex>
#include <string_view>

#include "titan/core/error.h"

namespace titan::optim {
namespace {

struct GroupRule {
  std::regex pattern;
  AdamOptions options;
};

std::string_view trimmed(std::string_view text) {
  size_t first = text.find_first_not_of(' ');
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(' ') - first + 1);
}

double* option_named(AdamOptions& options, std::string_view key) {
  const std::map<std::string_view, double AdamOptions::*> members = {
      {"lr", &AdamOptions::lr},
      {"beta1", &AdamOptions::beta1},
      {"beta2", &AdamOptions::beta2},
      {"eps", &AdamOptions::eps},
      {"weight_decay", &AdamOptions::weight_decay}};
  auto found = members.find(key);
  return found == members.end() ? nullptr : &(options.*found->second);
}

// "key=value" into `options`.
void apply_assignment(std::string_view text, AdamOptions& options) {
  size_t equals = text.find('=');
  if (equals == std::string_view::npos) throw ConfigError(titan::str("expected key=value, got '", text, "'"));
  std::string_view key = trimmed(text.substr(0, equals)), value = trimmed(text.substr(equals + 1));
  double* option = option_named(options, key);
  if (!option)
    throw ConfigError(titan::str("unknown key '", key, "'; known: lr beta1 beta2 eps weight_decay"));
  double number = 0;
  auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  bool beta = key.starts_with("beta");
  bool read = error == std::errc{} && end == value.data() + value.size();
  if (!read || !std::isfinite(number) || number < 0 || (beta && number >= 1)) {
    throw ConfigError(titan::str(key, " must be ",
                                 beta ? "a number from 0 to below 1" : "a finite number of at least 0",
                                 ", got '", value, "'"));
  }
  *option = number;
}

// "regex: key=value, key=value". The regex may contain colons; what follows the last ": " are the values.
GroupRule parse_rule(const std::string& text, AdamOptions options) {
  size_t colon = text.rfind(": ");
  if (colon == std::string::npos) throw ConfigError("expected \"regex: key=value, ...\"");
  std::string_view values = std::string_view(text).substr(colon + 2);
  for (size_t start = 0; start <= values.size();) {
    size_t comma = std::min(values.find(',', start), values.size());
    apply_assignment(trimmed(values.substr(start, comma - start)), options);
    start = comma + 1;
  }
  try {
    return {std::regex(text.substr(0, colon)), options};
  } catch (const std::regex_error& error) {
    throw ConfigError(titan::str("not a regular expression: ", error.what()));
  }
}

}  // namespace

GroupAssignment assign_groups(const OptimizerSettings& settings, const std::vector<std::string>& names,
                              const std::vector<std::string>& elsewhere) {
  AdamOptions defaults{settings.lr, settings.beta1, settings.beta2, settings.eps, settings.weight_decay};
  GroupAssignment result{{defaults}, std::vector<size_t>(names.size(), 0)};
  std::vector<std::string> problems;
  for (const std::string& text : settings.param_groups) {
    std::string where = titan::str("optimizer.param_groups: \"", text, "\": ");
    try {
      GroupRule rule = parse_rule(text, defaults);
      bool matched = std::any_of(elsewhere.begin(), elsewhere.end(), [&](const std::string& name) {
        return std::regex_search(name, rule.pattern);
      });
      for (size_t i = 0; i < names.size(); ++i) {
        if (!std::regex_search(names[i], rule.pattern)) continue;
        matched = true;
        if (result.group_of[i] == 0) result.group_of[i] = result.groups.size();
      }
      if (!matched) problems.push_back(where + "matches no parameter");
      result.groups.push_back(rule.options);
    } catch (const ConfigError& error) {
      problems.push_back(where + error.what());
    }
  }
  if (!problems.empty()) throw ConfigError(std::move(problems));
  return result;
}

}  // namespace titan::optim

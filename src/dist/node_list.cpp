#include "node_list.h"

#include <charconv>

#include "titan/core/error.h"

namespace titan::dist {
namespace {

/// Splits at commas outside brackets.
std::vector<std::string_view> split(std::string_view list) {
  std::vector<std::string_view> parts;
  size_t start = 0;
  int depth = 0;
  for (size_t i = 0; i <= list.size(); ++i) {
    if (i == list.size() || (list[i] == ',' && depth == 0)) {
      parts.push_back(list.substr(start, i - start));
      start = i + 1;
    } else if (list[i] == '[') {
      ++depth;
    } else if (list[i] == ']') {
      --depth;
    }
  }
  return parts;
}

int to_number(std::string_view digits, std::string_view list) {
  int number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (digits.empty() || error != std::errc() || end != digits.data() + digits.size() || number < 0) {
    throw ConfigError(str("SLURM list '", list, "': '", digits, "' isn't a number"));
  }
  return number;
}

/// "01-03" -> 01 02 03, as wide as the first bound; "7" -> 7.
void expand_range(std::string_view range, std::string_view list, std::vector<std::string>& out) {
  const size_t dash = range.find('-');
  const std::string_view first = range.substr(0, dash);
  const int low = to_number(first, list);
  const int high = dash == std::string_view::npos ? low : to_number(range.substr(dash + 1), list);
  if (high < low) throw ConfigError(str("SLURM list '", list, "': range '", range, "' runs backwards"));
  for (int number = low; number <= high; ++number) {
    std::string digits = std::to_string(number);
    if (digits.size() < first.size()) digits.insert(0, first.size() - digits.size(), '0');
    out.push_back(digits);
  }
}

/// One name with any number of brackets.
std::vector<std::string> expand(std::string_view name, std::string_view list) {
  const size_t open = name.find('[');
  if (open == std::string_view::npos) return {std::string(name)};
  const size_t close = name.find(']', open);
  if (close == std::string_view::npos) throw ConfigError(str("SLURM list '", list, "': '[' without ']'"));
  std::vector<std::string> numbers, names;
  for (auto range : split(name.substr(open + 1, close - open - 1))) expand_range(range, list, numbers);
  const auto tails = expand(name.substr(close + 1), list);
  for (const auto& number : numbers) {
    for (const auto& tail : tails) names.push_back(str(name.substr(0, open), number, tail));
  }
  return names;
}

}  // namespace

std::vector<std::string> parse_node_list(std::string_view list) {
  std::vector<std::string> names;
  for (auto part : split(list)) {
    if (part.empty()) throw ConfigError(str("SLURM list '", list, "' has an empty name"));
    for (auto& name : expand(part, list)) names.push_back(std::move(name));
  }
  return names;
}

std::vector<int> parse_task_counts(std::string_view list) {
  std::vector<int> counts;
  for (auto part : split(list)) {
    const size_t times = part.find("(x");
    const int count = to_number(part.substr(0, times), list);
    int repeat = 1;
    if (times != std::string_view::npos) {
      if (part.back() != ')') throw ConfigError(str("SLURM list '", list, "': '(' without ')'"));
      repeat = to_number(part.substr(times + 2, part.size() - times - 3), list);
    }
    counts.insert(counts.end(), static_cast<size_t>(repeat), count);
  }
  return counts;
}

}  // namespace titan::dist

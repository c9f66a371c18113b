// The one file that includes toml++: it costs five seconds.

// Some mistakes ("[=", "[ }", "12:x") break assertions of toml++ 3.3, which a release build takes as promises
// for the optimizer, although the code behind them reports the mistake. So: neither assertions nor promises.
#undef NDEBUG
#define TOML_ASSERT(expr) static_cast<void>(0)
#include <toml++/toml.h>

#include <algorithm>
#include <tuple>

#include "document.h"
#include "titan/config/value.h"
#include "titan/core/error.h"

namespace titan::config {
namespace {

Place place_at(const toml::source_region& source, const std::string& file) {
  return {file, source.begin.line, source.begin.column};
}

Raw raw_of(const toml::node& node);

Raw raw_list(const toml::array& array) {
  Raw::List list;
  for (const toml::node& item : array) list.push_back(raw_of(item));
  return {std::move(list)};
}

Raw raw_of(const toml::node& node) {
  switch (node.type()) {
    case toml::node_type::boolean:
      return {node.as_boolean()->get()};
    case toml::node_type::integer:
      return {node.as_integer()->get()};
    case toml::node_type::floating_point:
      return {node.as_floating_point()->get()};
    case toml::node_type::string:
      return {node.as_string()->get()};
    case toml::node_type::array:
      return raw_list(*node.as_array());
    case toml::node_type::table:
      return {Raw::Other{"a table"}};
    default:
      return {Raw::Other{"a date or time"}};
  }
}

void collect(const toml::table& table, const std::string& prefix, const std::string& file,
             Document& document) {
  for (const auto& [key, node] : table) {
    std::string name = joined(prefix, key.str());
    // The key's own position: a value's may be lines below it, a table's isn't kept where dots imply the
    // table.
    Place place = place_at(key.source(), file);
    if (const toml::table* child = node.as_table()) {
      document.headings.push_back({name, place});
      collect(*child, name, file, document);
    } else {
      document.leaves.push_back({name, place, raw_of(node)});
    }
  }
}

/// toml++ keeps keys sorted; messages and overrides want the order of the file.
void sort_by_place(Document& document) {
  auto by_place = [](const auto& a, const auto& b) {
    return std::tie(a.place.line, a.place.column) < std::tie(b.place.line, b.place.column);
  };
  std::stable_sort(document.leaves.begin(), document.leaves.end(), by_place);
}

/// toml++ limits how deep values nest but not how many parts a dotted key has, and destroys its tables
/// recursively.
void check_dots(std::string_view text, const std::string& file) {
  constexpr size_t kMaxDots = 1000;
  size_t dots = 0;
  size_t line = 1;
  for (char c : text) {
    if (c == '\n') dots = 0, ++line;
    if (c == '.' && ++dots > kMaxDots)
      throw ConfigError(str(to_text(Place{file, line, 1}), ": a line with more than ", kMaxDots, " dots"));
  }
}

}  // namespace

Document read_toml(std::string_view text, const std::string& file) {
  check_dots(text, file);
  try {
    Document document;
    collect(toml::parse(text, file), "", file, document);
    sort_by_place(document);
    return document;
  } catch (const toml::parse_error& error) {
    throw ConfigError(str(to_text(place_at(error.source(), file)), ": not TOML: ", error.description()));
  }
}

}  // namespace titan::config

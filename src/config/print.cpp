// The resolved config as TOML and as JSON.

#include "titan/config/print.h"

#include <cmath>

#include "tree.h"

namespace titan::config {
namespace {

bool is_unset(const Value& value) { return std::holds_alternative<std::monostate>(value); }

/// TOML wants a table's own keys before its sub-tables.
void write_toml(const Node& table, const std::string& name, std::string& text) {
  std::string keys;
  for (const Node& node : table.children) {
    if (node.field == nullptr) continue;
    keys += is_unset(node.value) ? str("# ", node.key, " is unset (", name_of(node.field->kind), ")\n")
                                 : str(node.key, " = ", to_text(node.value), "\n");
  }
  if (!keys.empty()) text += str(text.empty() ? "" : "\n", "[", name, "]\n", keys);
  for (const Node& node : table.children)
    if (node.field == nullptr) write_toml(node, name.empty() ? node.key : name + "." + node.key, text);
}

std::string json_value(const Value& value) {
  if (is_unset(value)) return "null";
  const auto* real = std::get_if<double>(&value);
  bool has_no_literal = real != nullptr && !std::isfinite(*real);
  return has_no_literal ? config::quoted(to_text(value)) : to_text(value);
}

void write_json(const Node& table, size_t depth, std::string& text) {
  std::string indent(2 * depth, ' ');
  text += "{";
  for (size_t i = 0; i < table.children.size(); ++i) {
    const Node& node = table.children[i];
    text += str(i == 0 ? "\n" : ",\n", indent, "  ", config::quoted(node.key), ": ");
    if (node.field != nullptr) {
      text += json_value(node.value);
    } else {
      write_json(node, depth + 1, text);
    }
  }
  text += str("\n", indent, "}");
}

}  // namespace

namespace detail {

std::string print_toml(const Schema& schema, const void* job) {
  std::string text;
  write_toml(tree_of(schema, job), "", text);
  return text;
}

std::string print_json(const Schema& schema, const void* job) {
  std::string text;
  write_json(tree_of(schema, job), 0, text);
  return text + "\n";
}

void check_job(const Schema& schema, const std::type_info& type) {
  TITAN_CHECK(schema.job_type() == type, "this schema describes another struct than the one to print");
}

}  // namespace detail
}  // namespace titan::config

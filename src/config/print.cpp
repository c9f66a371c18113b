// The resolved config as TOML and as JSON.

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "titan/config/load.h"
#include "titan/config/schema.h"

namespace titan::config {
namespace {

/// A setting with its value, or a table of them.
struct Node {
  std::string key;                   ///< one component, no dots
  const FieldInfo* field = nullptr;  ///< nullptr for a table
  Value value;
  std::vector<Node> children;  ///< in the schema's order
};

Node& child(Node& table, std::string_view key) {
  auto found = std::find_if(table.children.begin(), table.children.end(),
                            [&](const Node& node) { return node.key == key; });
  if (found != table.children.end()) return *found;
  table.children.push_back({std::string(key), nullptr, {}, {}});
  return table.children.back();
}

Node& descendant(Node& root, std::string_view name) {
  Node* node = &root;
  while (!name.empty()) {
    size_t dot = std::min(name.find('.'), name.size());
    node = &child(*node, name.substr(0, dot));
    name.remove_prefix(std::min(dot + 1, name.size()));
  }
  return *node;
}

void insert(Node& root, const std::string& section, const std::vector<FieldInfo>& fields,
            const void* settings) {
  for (const FieldInfo& field : fields) {
    if (field.role != FieldInfo::Role::Setting) continue;
    Node& node = descendant(root, section + "." + field.key);
    node.field = &field;
    node.value = field.get(settings);
  }
}

/// The root table. Its fields belong to the schema and the job.
Node tree_of(const Schema& schema, const void* job) {
  Node root;
  for (const Section& section : schema.sections()) {
    insert(root, section.name, section.fields, job);
    if (!section.resolve) continue;
    const DynamicTable& table = section.table_of(const_cast<void*>(job));  // only read here
    if (table.settings) insert(root, section.name, table.fields, table.settings.get());
  }
  return root;
}

bool is_unset(const Value& value) { return std::holds_alternative<std::monostate>(value); }

/// In TOML, a table's own keys come before its sub-tables.
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

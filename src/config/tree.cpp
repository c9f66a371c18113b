#include "tree.h"

#include <algorithm>
#include <string_view>

namespace titan::config {
namespace {

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

}  // namespace

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

}  // namespace titan::config

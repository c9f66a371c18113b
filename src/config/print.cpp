// The resolved config as TOML and as JSON, and the schema as text: the command's help, docs/config.md, and
// the table of another program's keys.

#include <algorithm>
#include <cmath>
#include <sstream>

#include "config/document.h"

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

/// The root table. Its fields belong to the schema and the job.
Node tree_of(const Schema& schema, JobRef job) {
  TITAN_CHECK(schema.job_type() == job.type, "this schema describes a struct other than the one to print");
  Node root;
  for_each_field(schema, job.address,
                 [&](const std::string& name, const FieldInfo& field, const void* settings) {
                   if (field.role != FieldInfo::Role::Setting) return;
                   Node& node = descendant(root, name);
                   node.field = &field;
                   node.value = field.get(settings);
                   if (!field.constraint.zero.empty() && node.value == Value(int64_t{0}))
                     node.value = field.constraint.zero;
                 });
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

void for_each_field(const Schema& schema, const void* job, const FieldVisitor& visit) {
  for (const Section& section : schema.sections()) {
    for (const FieldInfo& field : section.fields) visit(section.name + "." + field.key, field, job);
    if (!section.resolve) continue;
    const DynamicTable& table = section.table_of(const_cast<void*>(job));  // only read here
    if (!table.settings) continue;
    for (const FieldInfo& field : table.fields)
      visit(section.name + "." + field.key, field, table.settings.get());
  }
}

std::string print_toml(const Schema& schema, JobRef job) {
  std::string text;
  write_toml(tree_of(schema, job), "", text);
  return text;
}

std::string print_json(const Schema& schema, JobRef job) {
  std::string text;
  write_json(tree_of(schema, job), 0, text);
  return text + "\n";
}

// ---- resolved configs as text, without a schema: runs of models unknown to this program can be compared

using PrintedSettings = std::map<std::string, std::string>;

PrintedSettings printed_settings(const std::string& toml) {
  PrintedSettings settings;
  std::istringstream lines(toml);
  std::string line, section;
  while (std::getline(lines, line)) {
    if (line.empty() || line[0] == '#') continue;
    if (line[0] == '[') {
      section = line.substr(1, line.find(']') - 1);
    } else if (const size_t equals = line.find(" = "); equals != std::string::npos) {
      settings[section + "." + line.substr(0, equals)] = line.substr(equals + 3);
    }
  }
  return settings;
}

std::vector<std::string> setting_differences(const std::string& a, const std::string& b,
                                             const std::vector<std::string>& other_than) {
  const PrintedSettings in_a = printed_settings(a), in_b = printed_settings(b);
  const auto value_in = [](const PrintedSettings& settings, const std::string& key) {
    const auto found = settings.find(key);
    return found == settings.end() ? "unset" : found->second;
  };
  PrintedSettings in_either = in_a;
  in_either.insert(in_b.begin(), in_b.end());
  std::vector<std::string> lines;
  for (const auto& [key, value] : in_either) {
    const std::string table = key.substr(0, key.find('.'));
    if (std::find(other_than.begin(), other_than.end(), table) != other_than.end()) continue;
    if (value_in(in_a, key) != value_in(in_b, key))
      lines.push_back(str(key, ": ", value_in(in_a, key), " | ", value_in(in_b, key)));
  }
  return lines;
}

// ---- the schema

std::string unsupported_text(const FieldInfo& field) {
  return str("not supported", field.only_where.empty() ? "" : " with " + field.only_where, ": ",
             field.reason);
}

namespace {

using Role = FieldInfo::Role;

/// The section's fields. For a dynamic section, those of `job`, or none if it can't be resolved.
std::vector<FieldInfo> fields_of(const void* job, const Section& section) {
  if (!section.resolve) return section.fields;
  try {
    DynamicTable table = section.resolve(job, Origins());
    for (FieldInfo& field : table.fields) field.default_value = field.get(table.settings.get());
    return table.fields;
  } catch (const ConfigError&) {
    return {};
  }
}

std::string type_text(const FieldInfo& field) {
  return std::string(name_of(field.kind)) + (field.optional ? "?" : "");
}

std::string sentence(const FieldInfo& field) {
  switch (field.role) {
    case Role::Refused:
      return unsupported_text(field);
    case Role::WithoutEffect:
      return str("accepted without effect: ", field.reason);
    case Role::Mapped:
      return str("another name of ", field.mapped_to, ": ", field.reason);
    default:
      return field.meaning;
  }
}

// ---- help

/// Words in lines of at most `columns`, each indented.
std::string wrapped(const std::string& text, size_t indent, size_t columns) {
  std::istringstream words(text);
  std::string lines;
  size_t used = columns;  // the first word begins a line
  for (std::string word; words >> word;) {
    bool fits = used + 1 + word.size() <= columns;
    lines += fits ? " " : str(lines.empty() ? "" : "\n", std::string(indent, ' '));
    lines += word;
    used = (fits ? used + 1 : indent) + word.size();
  }
  return lines + "\n";
}

std::string help_entry(const std::string& section, const FieldInfo& field, size_t columns) {
  std::string details = sentence(field);
  if (field.role == Role::Setting) {
    if (!field.constraint.allowed.empty()) details += "; " + field.constraint.allowed;
    details += " [" + to_text(field.default_value) + "]";
  }
  return str("  --", section, ".", field.key, " ", type_text(field), "\n", wrapped(details, 8, columns));
}

// ---- Markdown

/// A '|' would end the cell.
std::string cell(const std::string& text) {
  std::string escaped;
  for (char c : text) {
    if (c == '|') escaped += '\\';
    escaped += c;
  }
  return escaped;
}

std::string code(const std::string& text) { return text.empty() ? "" : "`" + text + "`"; }

std::string markdown_row(const FieldInfo& field) {
  std::string default_text = field.role == Role::Mapped ? "" : to_text(field.default_value);
  std::string allowed = field.role == Role::Refused ? "only " + default_text : field.constraint.allowed;
  return str("| `", field.key, "` | ", type_text(field), " | ", cell(code(default_text)), " | ",
             cell(allowed), " | ", cell(sentence(field)), " |\n");
}

std::string role_text(const FieldInfo& field) {
  switch (field.role) {
    case Role::Refused:
      return field.only_where.empty() ? "refused" : "refused with `" + field.only_where + "`";
    case Role::WithoutEffect:
      return "without effect";
    case Role::Mapped:
      return "mapped to `" + field.mapped_to + "`";
    default:
      return "accepted";
  }
}

std::string help_of(const Schema& schema, const void* job, size_t columns) {
  std::string text;
  for (const Section& section : schema.sections()) {
    text += str(text.empty() ? "" : "\n", "[", section.name, "]", section.meaning.empty() ? "" : "  ",
                section.meaning, "\n");
    for (const FieldInfo& field : fields_of(job, section)) text += help_entry(section.name, field, columns);
  }
  return text;
}

}  // namespace

std::string help_text(const Schema& schema, size_t columns) {
  return help_of(schema, schema.defaults(), columns);
}

std::string help_text(const Schema& schema, JobRef job, size_t columns) {
  TITAN_CHECK(schema.job_type() == job.type, "this schema describes a struct other than the job's");
  return help_of(schema, job.address, columns);
}

std::string markdown(const Schema& schema) {
  std::string text;
  for (const Section& section : schema.sections()) {
    text += str(text.empty() ? "" : "\n", "## [", section.name, "]\n\n");
    if (!section.meaning.empty()) text += section.meaning + "\n\n";
    std::vector<FieldInfo> fields = fields_of(schema.defaults(), section);
    if (fields.empty()) continue;
    text += "| key | type | default | allowed | meaning |\n| --- | --- | --- | --- | --- |\n";
    for (const FieldInfo& field : fields) text += markdown_row(field);
  }
  return text;
}

std::string key_table(const Schema& schema, const std::vector<ForeignKey>& keys) {
  std::string text = "| key | here | its default | default here | note |\n| --- | --- | --- | --- | --- |\n";
  for (const ForeignKey& key : keys) {
    const FieldInfo* field = schema.find(key.name);
    TITAN_CHECK(field != nullptr, key.name, " isn't described in any table");
    std::string ours = field->role == Role::Mapped ? "" : to_text(field->default_value);
    text += str("| `", key.name, "` | ", role_text(*field), " | ", cell(code(key.default_text)), " | ",
                ours == key.default_text ? "same" : cell(code(ours)), " | ",
                cell(field->role == Role::Setting ? field->meaning : field->reason), " |\n");
  }
  return text;
}

}  // namespace titan::config

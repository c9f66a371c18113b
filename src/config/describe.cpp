// The schema as text: the command's help, docs/config.md, and the table of another program's keys.

#include <sstream>

#include "catalog.h"
#include "titan/config/load.h"

namespace titan::config {
namespace {

using Role = FieldInfo::Role;

/// The section's fields. For a dynamic section, those of a default job, or none if it can't be resolved.
std::vector<FieldInfo> fields_of(const Schema& schema, const Section& section) {
  if (!section.resolve) return section.fields;
  try {
    DynamicTable table = section.resolve(schema.defaults(), Origins());
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
      return str("not supported", field.only_where.empty() ? "" : " with " + field.only_where, ": ",
                 field.reason);
    case Role::WithoutEffect:
      return str("accepted without effect: ", field.reason);
    case Role::Mapped:
      return str("another name of ", field.mapped_to, ": ", field.reason);
    default:
      return field.meaning;
  }
}

std::string allowed_text(const FieldInfo& field) {
  if (field.role == Role::Refused) return str("only ", to_text(field.default_value));
  return field.constraint.allowed;
}

// ---- help

std::string help_details(const FieldInfo& field) {
  std::string text = sentence(field);
  if (field.role == Role::Setting) {
    if (!field.constraint.allowed.empty()) text += str("; ", field.constraint.allowed);
    text += str(" [", to_text(field.default_value), "]");
  }
  return text;
}

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
  std::string flag = str("  --", section, ".", field.key, " ", type_text(field), "\n");
  return flag + wrapped(help_details(field), 8, columns);
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
  return str("| `", field.key, "` | ", type_text(field), " | ", cell(code(default_text)), " | ",
             cell(allowed_text(field)), " | ", cell(sentence(field)), " |\n");
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

const std::string& note(const FieldInfo& field) {
  return field.role == Role::Setting ? field.meaning : field.reason;
}

}  // namespace

std::string help_text(const Schema& schema, size_t columns) {
  std::string text;
  for (const Section& section : schema.sections()) {
    text += str(text.empty() ? "" : "\n", "[", section.name, "]", section.meaning.empty() ? "" : "  ",
                section.meaning, "\n");
    for (const FieldInfo& field : fields_of(schema, section))
      text += help_entry(section.name, field, columns);
  }
  return text;
}

std::string markdown(const Schema& schema) {
  std::string text;
  for (const Section& section : schema.sections()) {
    text += str(text.empty() ? "" : "\n", "## [", section.name, "]\n\n");
    if (!section.meaning.empty()) text += section.meaning + "\n\n";
    std::vector<FieldInfo> fields = fields_of(schema, section);
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
                ours == key.default_text ? "same" : cell(code(ours)), " | ", cell(note(*field)), " |\n");
  }
  return text;
}

}  // namespace titan::config

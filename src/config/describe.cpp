// The schema as text: the command's help, the page docs/config.md, the table of another program's keys.

#include <algorithm>

#include "catalog.h"
#include "titan/config/print.h"

namespace titan::config {
namespace {

using Role = FieldInfo::Role;

/// The section's fields; a dynamic section's are those of a default job, and none where nothing can resolve
/// it yet.
std::vector<FieldInfo> fields_of(const Schema& schema, const Section& section) {
  if (!section.resolve) return section.fields;
  try {
    DynamicTable table = section.resolve(schema.defaults());
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
      return str("not supported: ", field.reason);
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
  std::string lines, line;
  auto end_line = [&] {
    if (!line.empty()) lines += std::string(indent, ' ') + line + "\n";
    line.clear();
  };
  for (size_t start = 0; start < text.size();) {
    size_t end = std::min(text.find(' ', start), text.size());
    if (!line.empty() && indent + line.size() + 1 + (end - start) > columns) end_line();
    line += (line.empty() ? "" : " ") + text.substr(start, end - start);
    start = end + 1;
  }
  end_line();
  return lines;
}

std::string help_entry(const std::string& section, const FieldInfo& field, size_t columns) {
  std::string flag = str("  --", section, ".", field.key, " ", type_text(field), "\n");
  return flag + wrapped(help_details(field), 8, columns);
}

// ---- Markdown

std::string cell(std::string text) {
  for (size_t at = 0; (at = text.find('|', at)) != std::string::npos; at += 2) text.insert(at, "\\");
  return text;
}

std::string code(const std::string& text) { return text.empty() ? "" : "`" + text + "`"; }

std::string markdown_row(const FieldInfo& field) {
  std::string default_text = field.role == Role::Mapped ? "" : to_text(field.default_value);
  return str("| `", field.key, "` | ", type_text(field), " | ", cell(code(default_text)), " | ",
             cell(allowed_text(field)), " | ", cell(sentence(field)), " |\n");
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

std::string key_table(const Schema& schema, const std::vector<std::string>& full_names) {
  std::string text = "| key | here | default | note |\n| --- | --- | --- | --- |\n";
  for (const std::string& name : full_names) {
    const FieldInfo* field = schema.find(name);
    TITAN_CHECK(field != nullptr, name, " isn't described in any table");
    constexpr const char* kRoles[] = {"accepted", "refused", "without effect", "mapped"};
    text += str("| `", name, "` | ", kRoles[static_cast<int>(field->role)], " | ",
                cell(code(field->role == Role::Mapped ? "" : to_text(field->default_value))), " | ",
                cell(field->role == Role::Mapped ? str("`", field->mapped_to, "`: ", field->reason)
                     : field->reason.empty()     ? field->meaning
                                                 : field->reason),
                " |\n");
  }
  return text;
}

}  // namespace titan::config

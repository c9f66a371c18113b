#include "catalog.h"

#include "titan/core/error.h"

namespace titan::config {

std::string_view table_of(std::string_view name) {
  size_t dot = name.rfind('.');
  return dot == std::string_view::npos ? std::string_view() : name.substr(0, dot);
}

std::string_view key_of(std::string_view name) { return name.substr(name.rfind('.') + 1); }

std::string did_you_mean(const std::vector<std::string>& names) {
  if (names.empty()) return {};
  std::string listed;
  for (const auto& name : names) listed += str(listed.empty() ? "" : " or ", "'", name, "'");
  return "; did you mean " + listed + "?";
}

bool is_on(const FieldInfo& field, const Value& value) {
  return field.kind == Kind::Bool ? value == Value(true) : value != field.default_value;
}

Catalog::Catalog(const Schema& schema) {
  for (const Section& section : schema.sections()) {
    add_fields(section.name, section.fields);
    if (!section.resolve) continue;
    dynamic_.push_back(&section);
    add_table(section.name);
  }
  for (const auto& [name, field] : fields_)
    if (!field->only_where.empty()) switch_of(name, *field);
}

void Catalog::add_fields(const std::string& section, const std::vector<FieldInfo>& fields) {
  for (const FieldInfo& field : fields) {
    names_.push_back(section + "." + field.key);
    fields_[names_.back()] = &field;
    add_table(std::string(table_of(names_.back())));
  }
}

void Catalog::add_table(std::string name) {
  for (std::string_view table = name; !table.empty(); table = table_of(table)) tables_.emplace(table);
}

const FieldInfo* Catalog::described(std::string_view name) const {
  auto found = fields_.find(name);
  return found == fields_.end() ? nullptr : found->second;
}

const FieldInfo& Catalog::switch_of(std::string_view name, const FieldInfo& field) const {
  std::string_view table = name.substr(0, name.size() - field.key.size());  // with its dot
  const FieldInfo* found = described(str(table, field.only_where));
  if (found == nullptr) found = described(field.only_where);
  TITAN_INTERNAL_ASSERT(found != nullptr, name, " refers to ", field.only_where, ", which isn't there");
  return *found;
}

Catalog::Entry Catalog::find(std::string_view name) const {
  const FieldInfo* field = described(name);
  if (field == nullptr || field->role != FieldInfo::Role::Mapped) return {std::string(name), field};
  std::string section(name.substr(0, name.size() - field->key.size()));  // with its dot
  return find(section + field->mapped_to);
}

bool Catalog::is_table(std::string_view name) const { return tables_.find(name) != tables_.end(); }

const Section* Catalog::dynamic_section_of(std::string_view name) const {
  for (const Section* section : dynamic_)
    if (name == section->name || name.starts_with(section->name + ".")) return section;
  return nullptr;
}

// Tries, in this order: a typo in the key, the right key in another table, a typo in both.
std::string Catalog::suggest_key(std::string_view name) const {
  constexpr size_t kMostTables = 3;
  std::string key(key_of(name));
  std::vector<std::string> siblings, elsewhere, similar;
  for (const std::string& known : names_) {
    if (table_of(known) == table_of(name)) siblings.emplace_back(key_of(known));
    if (key_of(known) == key && elsewhere.size() < kMostTables) elsewhere.push_back(known);
    if (!nearest_names(key, {std::string(key_of(known))}).empty()) similar.push_back(known);
  }
  auto slips = nearest_names(key, siblings, 1);
  if (!slips.empty()) return did_you_mean({str(table_of(name), ".", slips.front())});
  if (!elsewhere.empty()) return did_you_mean(elsewhere);
  return did_you_mean(nearest_names(name, similar, 1));
}

std::string Catalog::suggest_table(std::string_view name) const {
  auto near = nearest_names(name, {tables_.begin(), tables_.end()}, 1);
  return near.empty() ? "" : str("; did you mean [", near.front(), "]?");
}

}  // namespace titan::config

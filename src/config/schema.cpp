#include "titan/config/schema.h"

#include <set>

#include "titan/core/error.h"

namespace titan::config {

std::string Origins::origin_of(std::string_view name) const {
  auto found = given_.find(name);
  if (found == given_.end()) return "default";
  return found->second.place.empty() ? "command line" : found->second.place;
}

std::string Origins::problem(std::string_view name, std::string_view what) const {
  if (auto given = given_.find(name); given != given_.end()) {
    const auto& [place, shown] = given->second;
    return str(place.empty() ? "--" : place + ": ", name, shown.empty() ? "" : " = ", shown, ": ", what);
  }
  auto found = defaults_.find(name);
  if (found == defaults_.end()) return str(name, ": ", what);
  return str(name, " = ", found->second, " (default): ", what);
}

namespace detail {

FieldInfo memberless(std::string key, Value default_value, FieldInfo::Role role, std::string reason) {
  FieldInfo info;
  info.key = std::move(key);
  info.kind = kind_of(default_value);
  info.optional = std::holds_alternative<std::monostate>(default_value);
  info.role = role;
  info.reason = std::move(reason);
  info.get = [default_value](const void*) { return default_value; };
  info.set = [](void*, const Value&) {};
  info.default_value = std::move(default_value);
  return info;
}

}  // namespace detail

namespace {

void check_fields(const Section& section) {
  std::set<std::string> keys;
  for (const FieldInfo& field : section.fields) {
    std::string name = section.name + "." + field.key;
    TITAN_INTERNAL_ASSERT(keys.insert(field.key).second, name, " is described twice");
    bool is_set = !std::holds_alternative<std::monostate>(field.default_value);
    TITAN_INTERNAL_ASSERT(
        !is_set || !field.constraint.accepts || field.constraint.accepts(field.default_value), name,
        "'s default ", to_text(field.default_value), " isn't ", field.constraint.allowed);
  }
  for (const FieldInfo& field : section.fields)
    TITAN_INTERNAL_ASSERT(field.mapped_to.empty() || keys.count(field.mapped_to) != 0, section.name, ".",
                          field.key, " refers to ", field.mapped_to, ", which isn't there");
}

}  // namespace

void Schema::check_job(const std::type_info& type) const {
  TITAN_INTERNAL_ASSERT(type == *job_type_, "a table of another struct than the schema's");
}

void Schema::add_section(Section section) {
  for (const Section& other : sections_)
    TITAN_INTERNAL_ASSERT(other.name != section.name, "table [", section.name, "] is added twice");
  for (FieldInfo& field : section.fields) {
    field.default_value = field.get(defaults());
    std::string name = section.name + "." + field.key;
    TITAN_INTERNAL_ASSERT(find(name) == nullptr, name, " is described twice, in [", section.name,
                          "] and another table");
  }
  check_fields(section);
  sections_.push_back(std::move(section));
}

const FieldInfo* Schema::find(std::string_view full_name) const {
  for (const Section& section : sections_) {
    bool below = full_name.size() > section.name.size() && full_name.starts_with(section.name) &&
                 full_name[section.name.size()] == '.';
    if (!below) continue;
    std::string_view key = full_name.substr(section.name.size() + 1);
    for (const FieldInfo& field : section.fields)
      if (field.key == key) return &field;
  }
  return nullptr;
}

}  // namespace titan::config

// Values, constraints, and the tables of a schema.

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>

#include "titan/config/load.h"

namespace titan::config {
namespace {

/// "-4" of "-04", "22" of "+22".
std::string short_exponent(std::string_view exponent) {
  std::string sign = exponent[0] == '-' ? "-" : "";
  return sign + std::string(exponent.substr(exponent.find_first_not_of("+-0")));
}

std::string float_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char digits[32];  // the longest double takes 24
  auto end = std::to_chars(digits, digits + sizeof(digits), value).ptr;
  std::string text(digits, end);
  if (size_t e = text.find('e'); e != std::string::npos)
    return text.substr(0, e + 1) + short_exponent(text.substr(e + 1));
  return text.find('.') == std::string::npos ? text + ".0" : text;
}

std::string escaped_control(unsigned char c) {
  constexpr const char* kHex = "0123456789abcdef";
  return std::string("\\u00") + kHex[c >> 4] + kHex[c & 15];
}

template <class Items, class ToText>
std::string list_text(const Items& items, const ToText& item_text) {
  std::string text;
  for (const auto& item : items) text += (text.empty() ? "" : ", ") + item_text(item);
  return "[" + text + "]";
}

struct TextOf {
  std::string operator()(std::monostate) const { return "unset"; }
  std::string operator()(bool value) const { return value ? "true" : "false"; }
  std::string operator()(int64_t value) const { return std::to_string(value); }
  std::string operator()(double value) const { return float_text(value); }
  std::string operator()(const std::string& value) const { return config::quoted(value); }
  std::string operator()(const StringList& value) const { return list_text(value, *this); }
  std::string operator()(const std::vector<StringList>& value) const { return list_text(value, *this); }
};

Constraint numeric(std::string allowed, std::function<bool(double)> accepts) {
  auto check = [accepts = std::move(accepts)](const Value& value) {
    if (const auto* integer = std::get_if<int64_t>(&value)) return accepts(static_cast<double>(*integer));
    const auto* real = std::get_if<double>(&value);
    return real != nullptr && accepts(*real);
  };
  return {std::move(allowed), std::move(check), {}};
}

}  // namespace

std::string_view name_of(Kind kind) {
  constexpr std::string_view kNames[] = {
      "bool", "int", "float", "string", "list of strings", "list of lists of strings"};
  return kNames[static_cast<size_t>(kind)];
}

Kind kind_of(const Value& value) {
  constexpr Kind kKinds[] = {Kind::String, Kind::Bool,       Kind::Int,        Kind::Float,
                             Kind::String, Kind::StringList, Kind::StringLists};
  return kKinds[value.index()];
}

std::string to_text(const Value& value) { return std::visit(TextOf{}, value); }

std::string quoted(std::string_view text) {
  std::string result = "\"";
  for (char c : text) {
    unsigned char byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      result += {'\\', c};
    } else if (c == '\n') {
      result += "\\n";
    } else if (c == '\t') {
      result += "\\t";
    } else if (byte < 0x20 || byte == 0x7f) {  // TOML forbids a bare DEL
      result += escaped_control(byte);
    } else {
      result += c;
    }
  }
  return result + "\"";
}

Constraint one_of(std::vector<std::string> names) {
  std::string listed;
  for (const auto& name : names) listed += (listed.empty() ? "" : ", ") + config::quoted(name);
  auto known = [names](const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  auto accepts = [known](const Value& value) {
    if (const auto* list = std::get_if<StringList>(&value))
      return std::all_of(list->begin(), list->end(), known);
    const auto* name = std::get_if<std::string>(&value);
    return name != nullptr && known(*name);
  };
  return {"one of " + listed, accepts, names};
}

Constraint at_least(double lowest) {
  return numeric(str("at least ", lowest), [=](double value) { return value >= lowest; });
}

Constraint finite_at_least(double lowest) {
  return numeric(str("finite and at least ", lowest),
                 [=](double value) { return std::isfinite(value) && value >= lowest; });
}

Constraint above(double bound) {
  return numeric(str("above ", bound), [=](double value) { return value > bound; });
}

Constraint in_range(double lowest, double highest) {
  return numeric(str("from ", lowest, " to ", highest),
                 [=](double value) { return value >= lowest && value <= highest; });
}

Constraint in_range_below(double lowest, double bound) {
  return numeric(str("from ", lowest, " to below ", bound),
                 [=](double value) { return value >= lowest && value < bound; });
}

Constraint positive_or_minus_one() {
  return numeric("positive, or -1", [](double value) { return value >= 1 || value == -1; });
}

Constraint positive_or_auto() {
  Constraint constraint =
      numeric("from 1 to 65536, or \"auto\"", [](double value) { return value >= 1 && value <= 65536; });
  constraint.zero = "auto";
  return constraint;
}

// ---- schema

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

void Schema::check_job(const std::type_info& type) const {
  TITAN_INTERNAL_ASSERT(type == *job_type_, "the table's struct isn't the schema's");
}

void Schema::add_section(Section section) {
  for (const Section& other : sections_)
    TITAN_INTERNAL_ASSERT(other.name != section.name, "table [", section.name, "] is added twice");
  std::set<std::string> keys;
  for (FieldInfo& field : section.fields) {
    field.default_value = field.get(defaults());
    std::string name = section.name + "." + field.key;
    TITAN_INTERNAL_ASSERT(find(name) == nullptr, name, " is described twice, in [", section.name,
                          "] and another table");
    TITAN_INTERNAL_ASSERT(keys.insert(field.key).second, name, " is described twice");
    bool is_set = !std::holds_alternative<std::monostate>(field.default_value);
    TITAN_INTERNAL_ASSERT(
        !is_set || !field.constraint.accepts || field.constraint.accepts(field.default_value), name,
        "'s default ", to_text(field.default_value), " isn't ", field.constraint.allowed);
  }
  for (const FieldInfo& field : section.fields)
    TITAN_INTERNAL_ASSERT(field.mapped_to.empty() || keys.count(field.mapped_to) != 0, section.name, ".",
                          field.key, " refers to ", field.mapped_to, ", which doesn't exist");
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

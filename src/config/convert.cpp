#include "convert.h"

#include <charconv>
#include <cmath>
#include <limits>
#include <optional>

#include "catalog.h"
#include "titan/core/error.h"

namespace titan::config {
namespace {

constexpr double kExactInts = 9007199254740992.0;  // 2^53: larger floats don't identify an int

std::optional<Value> as_int(const Raw& raw) {
  if (const auto* integer = std::get_if<int64_t>(&raw.value)) return *integer;
  const auto* real = std::get_if<double>(&raw.value);
  bool integral = real != nullptr && std::trunc(*real) == *real && std::abs(*real) <= kExactInts;
  if (integral) return static_cast<int64_t>(*real);
  return std::nullopt;
}

std::optional<Value> as_float(const Raw& raw) {
  if (const auto* integer = std::get_if<int64_t>(&raw.value)) return static_cast<double>(*integer);
  if (const auto* real = std::get_if<double>(&raw.value); real != nullptr && !std::isnan(*real)) return *real;
  if (const auto* text = std::get_if<std::string>(&raw.value)) {  // JSON has no literal for infinity
    if (*text == "inf") return std::numeric_limits<double>::infinity();
    if (*text == "-inf") return -std::numeric_limits<double>::infinity();
  }
  return std::nullopt;
}

std::optional<StringList> as_strings(const Raw& raw) {
  const auto* items = std::get_if<Raw::List>(&raw.value);
  if (items == nullptr) return std::nullopt;
  StringList list;
  for (const Raw& item : *items) {
    const auto* text = std::get_if<std::string>(&item.value);
    if (text == nullptr) return std::nullopt;
    list.push_back(*text);
  }
  return list;
}

std::optional<Value> as_string_lists(const Raw& raw) {
  const auto* items = std::get_if<Raw::List>(&raw.value);
  if (items == nullptr) return std::nullopt;
  std::vector<StringList> lists;
  for (const Raw& item : *items) {
    auto list = as_strings(item);
    if (!list) return std::nullopt;
    lists.push_back(std::move(*list));
  }
  return lists;
}

std::optional<Value> as_kind(Kind kind, const Raw& raw) {
  switch (kind) {
    case Kind::Bool:
      if (const auto* boolean = std::get_if<bool>(&raw.value)) return *boolean;
      return std::nullopt;
    case Kind::Int:
      return as_int(raw);
    case Kind::Float:
      return as_float(raw);
    case Kind::String:
      if (const auto* text = std::get_if<std::string>(&raw.value)) return *text;
      return std::nullopt;
    case Kind::StringList:
      if (auto list = as_strings(raw)) return std::move(*list);
      return std::nullopt;
    case Kind::StringLists:
      return as_string_lists(raw);
  }
  return std::nullopt;
}

bool is_null(const Raw& raw) { return std::holds_alternative<Raw::Null>(raw.value); }

std::string type_problem(const FieldInfo& field, const Raw& raw) {
  bool wants_list = field.kind == Kind::StringList || field.kind == Kind::StringLists;
  if (wants_list && std::holds_alternative<Raw::List>(raw.value))
    return "must be " + with_article(field.kind);
  return str("must be ", with_article(field.kind), ", not ", type_of(raw));
}

std::string constraint_problem(const FieldInfo& field, const Value& value) {
  std::string problem = "must be " + field.constraint.allowed;
  const auto* text = std::get_if<std::string>(&value);
  return text == nullptr ? problem : problem + did_you_mean(nearest_names(*text, field.constraint.names, 1));
}

Converted convert_refused(const FieldInfo& field, const Raw& raw) {
  std::optional<Value> value = is_null(raw) ? Value() : as_kind(field.kind, raw);
  if (value == field.default_value) return {field.default_value, ""};
  return {{}, refusal(field)};
}

template <class Number>
std::optional<Number> parsed(std::string_view word) {
  Number number{};
  auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), number);
  if (error != std::errc() || end != word.data() + word.size()) return std::nullopt;
  return number;
}

Raw raw_number(std::string_view word) {
  if (auto integer = parsed<int64_t>(word)) return {*integer};
  if (auto real = parsed<double>(word)) return {*real};
  return {std::string(word)};
}

template <class ToItem>
Raw raw_list(std::string_view word, char separator, const ToItem& item_of) {
  Raw::List items;
  while (!word.empty()) {
    size_t end = std::min(word.find(separator), word.size());
    items.push_back(item_of(word.substr(0, end)));
    word.remove_prefix(std::min(end + 1, word.size()));
  }
  return {std::move(items)};
}

Raw raw_string(std::string_view word) { return {std::string(word)}; }

Raw raw_strings(std::string_view word) { return raw_list(word, ',', raw_string); }

}  // namespace

std::string refusal(const FieldInfo& field) {
  bool unset = std::holds_alternative<std::monostate>(field.default_value);
  return str("not supported", field.only_where.empty() ? "" : " with " + field.only_where, ": ", field.reason,
             unset ? "; it has to stay unset" : str("; only ", to_text(field.default_value), " is accepted"));
}

std::string with_article(Kind kind) { return str(kind == Kind::Int ? "an " : "a ", name_of(kind)); }

Converted convert(const FieldInfo& field, const Raw& raw) {
  bool is_refused = field.role == FieldInfo::Role::Refused;
  if (is_refused && field.only_where.empty()) return convert_refused(field, raw);
  bool any_kind = field.role != FieldInfo::Role::Setting && field.optional;  // an unset default has no type
  if (any_kind && is_null(raw)) return {};
  if (any_kind && !field.constraint.accepts) return {Value(to_text(raw)), ""};
  if (is_null(raw))
    return field.optional ? Converted{} : Converted{{}, "must be " + with_article(field.kind) + ", not null"};
  auto value = as_kind(field.kind, raw);
  if (!value) return {{}, type_problem(field, raw)};
  if (field.constraint.accepts && !field.constraint.accepts(*value))
    return {{}, constraint_problem(field, *value)};
  return {std::move(*value), ""};
}

Raw raw_of_word(const FieldInfo& field, std::string_view word) {
  if (field.optional && (word == "none" || word == "None")) return {Raw::Null{}};
  switch (field.kind) {
    case Kind::Bool:
      return word == "true" || word == "false" ? Raw{word == "true"} : raw_string(word);
    case Kind::Int:
    case Kind::Float:
      return raw_number(word);
    case Kind::String:
      return raw_string(word);
    case Kind::StringList:
      return raw_strings(word);
    case Kind::StringLists:
      return raw_list(word, ';', raw_strings);
  }
  return raw_string(word);
}

}  // namespace titan::config

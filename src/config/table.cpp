#include "titan/config/table.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "titan/core/error.h"

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

}  // namespace

std::string_view name_of(Kind kind) {
  switch (kind) {
    case Kind::Bool:
      return "bool";
    case Kind::Int:
      return "int";
    case Kind::Float:
      return "float";
    case Kind::String:
      return "string";
    case Kind::StringList:
      return "list of strings";
    case Kind::StringLists:
      return "list of lists of strings";
  }
  TITAN_INTERNAL_ASSERT(false, "kind ", static_cast<int>(kind));
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

namespace {

/// A number as people write it in a sentence: "1", not "1.0".
std::string number(double value) { return str(value); }

Constraint numeric(std::string allowed, std::function<bool(double)> accepts) {
  auto check = [accepts = std::move(accepts)](const Value& value) {
    if (const auto* integer = std::get_if<int64_t>(&value)) return accepts(static_cast<double>(*integer));
    const auto* real = std::get_if<double>(&value);
    return real != nullptr && accepts(*real);
  };
  return {std::move(allowed), std::move(check), {}};
}

}  // namespace

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
  return numeric("at least " + number(lowest), [=](double value) { return value >= lowest; });
}

Constraint finite_at_least(double lowest) {
  return numeric(str("finite and at least ", number(lowest)),
                 [=](double value) { return std::isfinite(value) && value >= lowest; });
}

Constraint above(double bound) {
  return numeric("above " + number(bound), [=](double value) { return value > bound; });
}

Constraint in_range(double lowest, double highest) {
  return numeric(str("from ", number(lowest), " to ", number(highest)),
                 [=](double value) { return value >= lowest && value <= highest; });
}

Constraint in_range_below(double lowest, double bound) {
  return numeric(str("from ", number(lowest), " to below ", number(bound)),
                 [=](double value) { return value >= lowest && value < bound; });
}

Constraint positive_or_minus_one() {
  return numeric("positive, or -1", [](double value) { return value >= 1 || value == -1; });
}

}  // namespace titan::config

#include "document.h"

#include <algorithm>
#include <cctype>
#include <cmath>

#include "titan/config/value.h"
#include "titan/core/error.h"

namespace titan::config {
namespace {

template <class... Cases>
struct Overloaded : Cases... {
  using Cases::operator()...;
};
template <class... Cases>
Overloaded(Cases...) -> Overloaded<Cases...>;

bool is_plain(std::string_view key) {
  auto plain = [](unsigned char c) { return std::isalnum(c) || c == '_' || c == '-'; };
  return !key.empty() && std::all_of(key.begin(), key.end(), plain);
}

std::string list_text(const Raw::List& list) {
  std::string text;
  for (const Raw& item : list) text += (text.empty() ? "" : ", ") + to_text(item);
  return "[" + text + "]";
}

}  // namespace

std::string to_text(const Place& place) { return str(place.file, ":", place.line, ":", place.column); }

std::string to_text(const Raw& raw) {
  return std::visit(Overloaded{[](Raw::Null) -> std::string { return "null"; },
                               [](const Raw::List& list) { return list_text(list); },
                               [](const Raw::Other& other) { return "<" + other.what + ">"; },
                               [](const auto& scalar) { return to_text(Value(scalar)); }},
                    raw.value);
}

std::string type_of(const Raw& raw) {
  return std::visit(
      Overloaded{[](Raw::Null) -> std::string { return "null"; },
                 [](bool) -> std::string { return "a bool"; },
                 [](int64_t) -> std::string { return "an int"; },
                 [](double value) -> std::string { return std::isnan(value) ? "nan" : "a float"; },
                 [](const std::string&) -> std::string { return "a string"; },
                 [](const Raw::List&) -> std::string { return "a list"; },
                 [](const Raw::Other& other) { return other.what; }},
      raw.value);
}

std::string joined(const std::string& prefix, std::string_view key) {
  std::string component = is_plain(key) ? std::string(key) : config::quoted(key);
  return prefix.empty() ? component : prefix + "." + component;
}

void move(Place& place, std::string_view text) {
  for (char c : text) {
    if (c == '\n') {
      ++place.line;
      place.column = 1;
    } else if ((static_cast<unsigned char>(c) & 0xc0) != 0x80) {  // not the continuation of a character
      ++place.column;
    }
  }
}

}  // namespace titan::config

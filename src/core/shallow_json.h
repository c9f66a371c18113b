#pragma once

// JSON out of a file, which may be anyone's.

#include <cstdint>
#include <limits>
#include <optional>
#include <string_view>

#include <nlohmann/json.hpp>

namespace titan {

/// To write, flatten or copy a tree takes the stack for each of its levels.
constexpr int kMaxJsonDepth = 64;

/// Counts are added and doubled without a further check.
constexpr int64_t kMaxJsonCount = std::numeric_limits<int64_t>::max() / 4;

/// The tree; a discarded one (`is_discarded()`, of no type) of text that isn't JSON, or that is nested deeper
/// than kMaxJsonDepth.
template <class Json = nlohmann::json>
Json parse_shallow_json(std::string_view text) {
  bool too_deep = false;
  const auto limit = [&too_deep](int depth, typename Json::parse_event_t event, Json&) {
    const bool begins =
        event == Json::parse_event_t::array_start || event == Json::parse_event_t::object_start;
    too_deep = too_deep || (begins && depth >= kMaxJsonDepth);
    return !too_deep;
  };
  Json tree = Json::parse(text, limit, /*allow_exceptions=*/false);
  return too_deep ? Json(Json::value_t::discarded) : tree;
}

/// A whole number of 0 to kMaxJsonCount; nullopt of anything else.
template <class Json>
std::optional<int64_t> json_count(const Json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const auto count = value.template get<uint64_t>();
  if (count > static_cast<uint64_t>(kMaxJsonCount)) return std::nullopt;
  return static_cast<int64_t>(count);
}

/// The member `key` of an object, as above; nullopt also where it isn't there, or `object` is none.
template <class Json>
std::optional<int64_t> json_count(const Json& object, const char* key) {
  if (!object.is_object()) return std::nullopt;
  const auto member = object.find(key);
  return member == object.end() ? std::nullopt : json_count(*member);
}

}  // namespace titan

#pragma once

// JSON as a tree; see [Note: reading JSON] in core/json.h.

#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "core/json.h"
#include "titan/core/error.h"

namespace titan {

/// Counts are added and doubled without a further check.
constexpr int64_t kMaxJsonCount = std::numeric_limits<int64_t>::max() / 4;

/// What is wrong with a text before it is parsed: a NUL byte, or nesting deeper than kMaxJsonDepth (copying
/// and printing a tree takes stack for each level). "" if nothing is.
std::string json_text_problem(std::string_view text);

/// The tree; a discarded one (`is_discarded()`, of no type) if the text isn't JSON of at most kMaxJsonDepth
/// levels, and then `problem` says why.
template <class Json = nlohmann::json>
Json parse_json(std::string_view text, std::string* problem = nullptr) {
  std::string wrong = json_text_problem(text);
  Json tree(Json::value_t::discarded);
  try {
    if (wrong.empty()) tree = Json::parse(text);
  } catch (const typename Json::exception& error) {  // also for a number out of range
    wrong = "not JSON: " + json_error_reason(error.what());
  }
  if (problem != nullptr) *problem = std::move(wrong);
  return tree;
}

/// The value in one line, or with an `indent` in several. U+FFFD replaces what isn't UTF-8.
template <class Json>
std::string json_text(const Json& value, int indent = -1) {
  return value.dump(indent, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

/// A whole number from 0 to kMaxJsonCount, or nullopt.
template <class Json>
std::optional<int64_t> json_count(const Json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const auto count = value.template get<uint64_t>();
  if (count > static_cast<uint64_t>(kMaxJsonCount)) return std::nullopt;
  return static_cast<int64_t>(count);
}

/// The same of a member; nullopt also if `object` has no such member or isn't an object.
template <class Json>
std::optional<int64_t> json_count(const Json& object, const char* key) {
  if (!object.is_object()) return std::nullopt;
  const auto member = object.find(key);
  return member == object.end() ? std::nullopt : json_count(*member);
}

/// A JSON object from a file; every error names the file.
class JsonFile {
 public:
  using Json = nlohmann::json;

  /// Throws ConfigError when `text` isn't a JSON object of at most kMaxJsonDepth levels.
  JsonFile(std::filesystem::path path, std::string_view text);

  const std::filesystem::path& path() const { return path_; }
  const Json& tree() const { return tree_; }

  [[noreturn]] void refuse(const std::string& what) const {
    throw ConfigError(str(path_.string(), ": ", what));
  }

  /// The member, or nullptr if it is missing or null.
  static const Json* find(const Json& object, const char* key) {
    if (!object.is_object()) return nullptr;
    auto found = object.find(key);
    return found == object.end() || found->is_null() ? nullptr : &*found;
  }

  /// The member; throws ConfigError if it is missing.
  const Json& need(const Json& object, const char* key) const {
    const Json* value = find(object, key);
    if (!value) refuse(str("'", key, "' is missing"));
    return *value;
  }

  /// The member as a T, or `otherwise` if it is missing; throws ConfigError if it has another type.
  template <class T>
  T get(const Json& object, const char* key, T otherwise) const {
    const Json* value = find(object, key);
    if (!value) return otherwise;
    try {
      return value->get<T>();
    } catch (const Json::exception&) {
      refuse(str("'", key, "' has the wrong type: ", value->dump().substr(0, 80)));
    }
  }

  /// The member `type`, by which Hugging Face tells parts apart; "?" if there is none.
  std::string type_of(const Json& part) const { return get<std::string>(part, "type", "?"); }

 private:
  std::filesystem::path path_;
  Json tree_;
};

}  // namespace titan

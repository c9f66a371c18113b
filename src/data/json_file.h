#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "titan/core/error.h"

namespace titan::data {

/// A JSON object from a file, with errors that name the file.
class JsonFile {
 public:
  using Json = nlohmann::json;

  /// Throws ConfigError when `text` isn't a JSON object, or is nested deeper than 64: copying and printing a
  /// part takes the stack.
  JsonFile(std::filesystem::path path, const std::string& text);

  const std::filesystem::path& path() const { return path_; }
  const Json& tree() const { return tree_; }

  [[noreturn]] void refuse(const std::string& what) const {
    throw ConfigError(str(path_.string(), ": ", what));
  }

  /// The member when it is there and not null.
  static const Json* find(const Json& object, const char* key) {
    if (!object.is_object()) return nullptr;
    auto found = object.find(key);
    return found == object.end() || found->is_null() ? nullptr : &*found;
  }

  /// The member; refuses when it isn't there.
  const Json& need(const Json& object, const char* key) const {
    const Json* value = find(object, key);
    if (!value) refuse(str("'", key, "' is missing"));
    return *value;
  }

  /// The member as a T, or `otherwise` when it isn't there; refuses one of another type.
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

  /// The `type` by which Hugging Face's parts are told apart; "?" when there is none.
  std::string type_of(const Json& part) const { return get<std::string>(part, "type", "?"); }

 private:
  std::filesystem::path path_;
  Json tree_;
};

}  // namespace titan::data

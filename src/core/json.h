#pragma once

// JSON out of a file, which may be anyone's.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <nlohmann/json.hpp>

#include "titan/core/error.h"

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

namespace titan::checkpoint::detail {

// JSON with a fixed form, read by events: no tree is built and nothing recurses, whatever the text. What may
// stand where is said by scopes, one for each kind of object and array; anything else ends the reading. So
// nesting is as deep as the scopes are, and memory is what they keep.

/// The inside of an object or an array while it is read. Each call tells what comes next; it returns what is
/// wrong with that, or nothing.
class JsonScope {
 public:
  virtual ~JsonScope() = default;
  virtual bool is_array() const = 0;
  /// Another one of the kind begins, maybe the hundredth.
  virtual void begin() = 0;
  virtual std::string key(const std::string& key);
  virtual std::string text(std::string& value);
  virtual std::string number(int64_t value);
  virtual std::string boolean(bool value);
  /// An object or array begins; `inside` will take what is in it.
  virtual std::string open(bool is_array, JsonScope*& inside);
  virtual std::string end() = 0;
  /// Where in this scope the text stands: ".step", "[12]".
  virtual std::string position() const = 0;
};

/// Where a value goes, and so what it has to be.
using JsonTarget = std::variant<std::string*, int64_t*, bool*, JsonScope*>;

/// An object with exactly these keys, or an array of exactly these values in this order.
class JsonRecord final : public JsonScope {
 public:
  enum class Form { Object, Array };
  struct Field {
    std::string name;  ///< in messages only, if it is an array
    JsonTarget target;
  };
  /// `taken` is called behind each: it uses what the targets hold, and returns what is wrong with it.
  JsonRecord(Form form, std::vector<Field> fields, std::function<std::string()> taken = {});

  bool is_array() const override { return form_ == Form::Array; }
  void begin() override;
  std::string key(const std::string& key) override;
  std::string text(std::string& value) override;
  std::string number(int64_t value) override;
  std::string boolean(bool value) override;
  std::string open(bool is_array, JsonScope*& inside) override;
  std::string end() override;
  std::string position() const override;

 private:
  std::string next(const JsonTarget*& target);
  template <class Value>
  std::string put(Value value, const char* what);

  Form form_;
  std::vector<Field> fields_;
  std::vector<bool> seen_;
  size_t current_ = 0;
  bool in_field_ = false;  // the text stands in current_, not behind it
  std::function<std::string()> taken_;
};

/// An array of at most `limit` objects or arrays of one kind.
class JsonList final : public JsonScope {
 public:
  JsonList(JsonScope& element, int64_t limit, std::function<std::string()> taken = {})
      : element_(element), limit_(limit), taken_(std::move(taken)) {}
  bool is_array() const override { return true; }
  void begin() override { count_ = 0; }
  std::string text(std::string& value) override;
  std::string number(int64_t value) override;
  std::string boolean(bool value) override;
  std::string open(bool is_array, JsonScope*& inside) override;
  std::string end() override { return taken_ ? taken_() : ""; }
  std::string position() const override;

 private:
  std::string unexpected(const char* what);

  JsonScope& element_;
  int64_t limit_;
  int64_t count_ = 0;
  std::function<std::string()> taken_;
};

/// An array of at most `limit` integers.
class JsonNumbers final : public JsonScope {
 public:
  JsonNumbers(std::vector<int64_t>& values, size_t limit) : values_(values), limit_(limit) {}
  bool is_array() const override { return true; }
  void begin() override { values_.clear(); }
  std::string number(int64_t value) override;
  std::string end() override { return ""; }
  std::string position() const override;

 private:
  std::vector<int64_t>& values_;
  size_t limit_;
};

/// An object of at most `limit` texts with any keys.
class JsonTexts final : public JsonScope {
 public:
  JsonTexts(std::map<std::string, std::string>& texts, size_t limit) : texts_(texts), limit_(limit) {}
  bool is_array() const override { return false; }
  void begin() override { texts_.clear(); }
  std::string key(const std::string& key) override;
  std::string text(std::string& value) override;
  std::string end() override { return ""; }
  std::string position() const override;

 private:
  std::map<std::string, std::string>& texts_;
  size_t limit_;
  std::string key_;
};

/// Reads a text that is one object. Returns what is wrong with it and where: "manifest.files[3].num_bytes:
/// ..."; or nothing.
std::string read_json(std::string_view text, JsonScope& object);

/// `text` as a JSON string, quotes included. What isn't UTF-8 in it is replaced by U+FFFD.
std::string quoted(std::string_view text);

}  // namespace titan::checkpoint::detail

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

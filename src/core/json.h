#pragma once

// [Note: reading JSON]
// JSON comes from files that anybody may have written: checkpoints, tokenizers, configs, records of a crash.
// Every reader in this library is one of these, and each has bounds on nesting and memory.
//
//   events   read_json() hands each token to a JsonEvents, which has a grammar of its own
//   form     JsonRecord, JsonList, ...: objects and arrays of a fixed form, read into variables
//   leaves   read_json_leaves(): every scalar with the path to it
//   tree     parse_json() and JsonFile: a nlohmann::json of at most kMaxJsonDepth levels
//
// NUL bytes, invalid UTF-8 and anything after the value are errors in all of them.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "titan/core/error.h"

namespace titan {

constexpr int kMaxJsonDepth = 64;

/// `text` as a JSON string, quotes included. U+FFFD replaces invalid UTF-8.
std::string json_quoted(std::string_view text);

/// The reason in a parser error, without the parser's own prefix: "syntax error while parsing value - ...".
std::string json_error_reason(std::string_view what);

/// Receives the tokens of a text in order. Each call returns what is wrong with the token; "" continues.
class JsonEvents {
 public:
  virtual ~JsonEvents() = default;
  virtual std::string null() { return "null"; }
  virtual std::string boolean(bool value) = 0;
  virtual std::string integer(int64_t value) = 0;
  /// An integer above the largest int64_t.
  virtual std::string large_integer(uint64_t value);
  virtual std::string real(double /*value*/) { return "a number that is no 64-bit integer"; }
  virtual std::string text(std::string& value) = 0;
  virtual std::string key(std::string& key) = 0;
  virtual std::string open(bool is_array) = 0;
  virtual std::string close() = 0;
  /// `position`: bytes up to and including the wrong one.
  virtual std::string syntax_error(size_t position, const std::string& reason);

 protected:
  /// How many bytes the parser has read: up to the end of the token, and one more after a number.
  size_t num_read() const { return num_read_; }

 private:
  friend std::string read_json(std::string_view text, JsonEvents& events);
  size_t num_read_ = 0;
};

/// Reads one value. Returns the first problem, or "".
std::string read_json(std::string_view text, JsonEvents& events);

// ---- objects and arrays of a fixed form

/// A value that is neither object nor array.
using JsonValue = std::variant<std::string, int64_t, bool>;

/// The inside of an object or array. Each call returns what is wrong, or "".
class JsonScope {
 public:
  virtual ~JsonScope() = default;
  virtual bool is_array() const = 0;
  /// Called at the beginning of each object or array that uses this scope; there may be many.
  virtual void begin() = 0;
  virtual std::string key(const std::string& key);
  virtual std::string value(JsonValue value);
  /// An object or array begins; `inside` will take its contents.
  virtual std::string open(bool is_array, JsonScope*& inside);
  virtual std::string end() = 0;
  /// The current place in this scope: ".step", "[12]".
  virtual std::string position() const = 0;
};

/// Where a value goes, which determines its type.
using JsonTarget = std::variant<std::string*, int64_t*, bool*, JsonScope*>;

/// An object with exactly these keys, or an array of exactly these values in this order.
class JsonRecord final : public JsonScope {
 public:
  enum class Form { Object, Array };
  struct Field {
    std::string name;  ///< in an array, only for messages
    JsonTarget target;
  };
  /// `taken` is called after each record, when the targets hold its values. It returns the problem, or "".
  JsonRecord(Form form, std::vector<Field> fields, std::function<std::string()> taken = {});

  bool is_array() const override { return form_ == Form::Array; }
  void begin() override;
  std::string key(const std::string& key) override;
  std::string value(JsonValue value) override;
  std::string open(bool is_array, JsonScope*& inside) override;
  std::string end() override;
  std::string position() const override;

 private:
  std::string next(const JsonTarget*& target);

  Form form_;
  std::vector<Field> fields_;
  std::vector<bool> seen_;
  size_t current_ = 0;
  bool in_field_ = false;  // reading the value of current_
  std::function<std::string()> taken_;
};

/// An array of at most `limit` objects or arrays of one kind.
class JsonList final : public JsonScope {
 public:
  JsonList(JsonScope& element, int64_t limit, std::function<std::string()> taken = {})
      : element_(element), limit_(limit), taken_(std::move(taken)) {}
  bool is_array() const override { return true; }
  void begin() override { count_ = 0; }
  std::string value(JsonValue value) override;
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
  std::string value(JsonValue value) override;
  std::string end() override { return ""; }
  std::string position() const override;

 private:
  std::vector<int64_t>& values_;
  size_t limit_;
};

/// An object of at most `limit` strings with any keys.
class JsonTexts final : public JsonScope {
 public:
  JsonTexts(std::map<std::string, std::string>& texts, size_t limit) : texts_(texts), limit_(limit) {}
  bool is_array() const override { return false; }
  void begin() override { texts_.clear(); }
  std::string key(const std::string& key) override;
  std::string value(JsonValue value) override;
  std::string end() override { return ""; }
  std::string position() const override;

 private:
  std::map<std::string, std::string>& texts_;
  size_t limit_;
  std::string key_;
};

/// Reads a text that is one object. Returns the first problem and its place, or "":
/// "manifest.files[3].num_bytes: a string; expected an integer".
std::string read_json(std::string_view text, JsonScope& object);

// ---- leaves

/// std::monostate is null.
using JsonScalar = std::variant<std::monostate, bool, int64_t, double, std::string>;
/// Keys and array positions from the root to a value.
using JsonPath = std::vector<std::string>;
using JsonLeaves = std::map<JsonPath, JsonScalar>;

/// The scalars of an object of at most `max_bytes` and kMaxJsonDepth levels. Throws ConfigError that names
/// `file` for a key given twice (readers differ in which one counts), for control characters in a key, and
/// when the paths of all leaves take many times the text (each element of a list repeats the list's key).
JsonLeaves read_json_leaves(std::string_view text, size_t max_bytes, const std::string& file);

// ---- trees

/// Counts are added and doubled without a further check.
constexpr int64_t kMaxJsonCount = std::numeric_limits<int64_t>::max() / 4;

/// Builds a tree of at most kMaxJsonDepth levels: copying and printing it takes stack for each level.
template <class Json>
class JsonTree final : public JsonEvents {
 public:
  std::string null() override { return put(nullptr); }
  std::string boolean(bool value) override { return put(value); }
  std::string integer(int64_t value) override {
    return value < 0 ? put(value) : put(static_cast<uint64_t>(value));  // as json_count() expects
  }
  std::string large_integer(uint64_t value) override { return put(value); }
  std::string real(double value) override { return put(value); }
  std::string text(std::string& value) override { return put(std::move(value)); }
  std::string key(std::string& key) override {
    const auto [member, is_new] = open_.back()->emplace(key, nullptr);
    if (!is_new) return str("duplicate key '", key.substr(0, 60), "'");
    member_ = &*member;
    return "";
  }
  std::string open(bool is_array) override {
    if (open_.size() == kMaxJsonDepth) return str("nested deeper than ", kMaxJsonDepth);
    put(is_array ? Json::array() : Json::object());
    open_.push_back(last_);
    return "";
  }
  std::string close() override {
    open_.pop_back();
    return "";
  }
  std::string syntax_error(size_t position, const std::string& reason) override {
    return str("not JSON at byte ", position, ": ", reason);
  }

  Json tree;

 private:
  std::string put(Json value) {
    last_ = open_.empty() ? &tree : open_.back()->is_array() ? &open_.back()->emplace_back() : member_;
    *last_ = std::move(value);
    return "";
  }

  std::vector<Json*> open_;
  Json* member_ = nullptr;  // where the value of the current key goes
  Json* last_ = nullptr;
};

/// The tree. If the text isn't JSON, nests too deep or has a key twice in one object, the tree is discarded
/// (`is_discarded()`, of no type) and `problem` says why.
template <class Json = nlohmann::json>
Json parse_json(std::string_view text, std::string* problem = nullptr) {
  JsonTree<Json> events;
  std::string wrong = read_json(text, events);
  if (!wrong.empty()) events.tree = Json(Json::value_t::discarded);
  if (problem != nullptr) *problem = std::move(wrong);
  return std::move(events.tree);
}

/// The value on one line, or with an `indent` on several. U+FFFD replaces invalid UTF-8.
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

/// The same for a member; nullopt also if `object` has no such member or isn't an object.
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

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

/// `text` as a JSON string, quotes included. U+FFFD replaces what isn't UTF-8.
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
  /// `taken` is called after each record: it uses what the targets hold, and returns what is wrong with it.
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

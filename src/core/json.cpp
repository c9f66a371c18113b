#include "core/json.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <nlohmann/json.hpp>

#include "titan/core/error.h"

namespace titan::checkpoint::detail {
namespace {

using nlohmann::json;

// Hands the parser's events to the innermost scope. A handler that returns false stops the parser.
class ScopeEvents final : public nlohmann::json_sax<json> {
 public:
  explicit ScopeEvents(JsonScope& root) : root_(root) {}
  std::string problem;

  bool null() override { return fail("null"); }
  bool boolean(bool value) override { return !open_.empty() ? go_on(inside().boolean(value)) : no_object(); }
  bool number_integer(number_integer_t value) override {
    return !open_.empty() ? go_on(inside().number(value)) : no_object();
  }
  bool number_unsigned(number_unsigned_t value) override {
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
      return fail(str(value, " is no 64-bit integer"));
    return number_integer(static_cast<int64_t>(value));
  }
  bool number_float(number_float_t, const string_t&) override {
    return fail("a number that is no 64-bit integer");
  }
  bool string(string_t& value) override { return !open_.empty() ? go_on(inside().text(value)) : no_object(); }
  bool binary(binary_t&) override { return fail("binary data"); }

  bool start_object(std::size_t) override { return open(/*is_array=*/false); }
  bool start_array(std::size_t) override { return open(/*is_array=*/true); }
  bool key(string_t& value) override { return go_on(inside().key(value)); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    constexpr size_t kShown = 200;
    problem = str("not valid JSON at byte ", position, ": ", std::string(error.what()).substr(0, kShown));
    return false;
  }

 private:
  JsonScope& inside() { return *open_.back(); }

  bool open(bool is_array) {
    if (open_.empty()) return is_array ? no_object() : enter(root_);
    JsonScope* scope = nullptr;
    return go_on(inside().open(is_array, scope)) && enter(*scope);
  }

  bool enter(JsonScope& scope) {
    scope.begin();
    open_.push_back(&scope);
    return true;
  }

  bool close() {
    const bool fine = go_on(inside().end());
    open_.pop_back();
    return fine;
  }

  bool no_object() { return fail("not an object"); }

  bool go_on(const std::string& what) { return what.empty() || fail(what); }

  bool fail(const std::string& what) {
    std::string where;
    for (const JsonScope* scope : open_) where += scope->position();
    // The root's own "." isn't wanted.
    problem = where.empty() ? what : str(where.substr(1), ": ", what);
    return false;
  }

  JsonScope& root_;
  std::vector<JsonScope*> open_;
};

}  // namespace

std::string read_json(std::string_view text, JsonScope& object) {
  // The parser takes a NUL for the end of its input.
  if (text.find('\0') != std::string_view::npos) return "contains a NUL byte";
  ScopeEvents events(object);
  json::sax_parse(text.begin(), text.end(), &events, json::input_format_t::json, /*strict=*/true);
  return events.problem;
}

std::string quoted(std::string_view text) {
  return json(text).dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace);
}

namespace {

std::string expected(const JsonTarget& target) {
  if (std::holds_alternative<std::string*>(target)) return "a string";
  if (std::holds_alternative<int64_t*>(target)) return "an integer";
  if (std::holds_alternative<bool*>(target)) return "true or false";
  return std::get<JsonScope*>(target)->is_array() ? "an array" : "an object";
}

const char* named(bool is_array) { return is_array ? "an array" : "an object"; }

// For a message: of a text from a stranger the beginning.
std::string shortened(const std::string& key) { return key.size() <= 60 ? key : key.substr(0, 60) + "..."; }

}  // namespace

std::string JsonScope::key(const std::string&) { return "a key"; }
std::string JsonScope::text(std::string&) { return "a string, where none is expected"; }
std::string JsonScope::number(int64_t) { return "a number, where none is expected"; }
std::string JsonScope::boolean(bool) { return "true or false, where neither is expected"; }
std::string JsonScope::open(bool is_array, JsonScope*&) {
  return str(named(is_array), ", where none is expected");
}

JsonRecord::JsonRecord(Form form, std::vector<Field> fields, std::function<std::string()> taken)
    : form_(form), fields_(std::move(fields)), seen_(fields_.size()), taken_(std::move(taken)) {}

void JsonRecord::begin() {
  seen_.assign(fields_.size(), false);
  in_field_ = false;
}

std::string JsonRecord::key(const std::string& key) {
  const auto field =
      std::find_if(fields_.begin(), fields_.end(), [&](const Field& known) { return known.name == key; });
  in_field_ = field != fields_.end();
  if (!in_field_) return str("unknown key '", shortened(key), "'");
  current_ = static_cast<size_t>(field - fields_.begin());
  if (seen_[current_]) return "the key stands there twice";
  seen_[current_] = true;
  return "";
}

// In an array the values come without keys: each is the next one.
std::string JsonRecord::next(const JsonTarget*& target) {
  if (is_array()) {
    const auto unseen = std::find(seen_.begin(), seen_.end(), false);
    in_field_ = unseen != seen_.end();
    if (!in_field_) return str("more than ", fields_.size(), " values");
    current_ = static_cast<size_t>(unseen - seen_.begin());
    *unseen = true;
  }
  target = &fields_[current_].target;
  return "";
}

template <class Value>
std::string JsonRecord::put(Value value, const char* what) {
  const JsonTarget* target = nullptr;
  const std::string problem = next(target);
  if (!problem.empty()) return problem;
  auto* const* place = std::get_if<Value*>(target);
  if (place == nullptr) return str(what, "; expected ", expected(*target));
  **place = std::move(value);
  return "";
}

std::string JsonRecord::text(std::string& value) { return put(std::move(value), "a string"); }
std::string JsonRecord::number(int64_t value) { return put(value, "a number"); }
std::string JsonRecord::boolean(bool value) { return put(value, "true or false"); }

std::string JsonRecord::open(bool is_array, JsonScope*& inside) {
  const JsonTarget* target = nullptr;
  const std::string problem = next(target);
  if (!problem.empty()) return problem;
  auto* const* scope = std::get_if<JsonScope*>(target);
  if (scope == nullptr || (*scope)->is_array() != is_array)
    return str(named(is_array), "; expected ", expected(*target));
  inside = *scope;
  return "";
}

std::string JsonRecord::end() {
  in_field_ = false;
  const auto unseen = std::find(seen_.begin(), seen_.end(), false);
  if (unseen == seen_.end()) return taken_ ? taken_() : "";
  const std::string& name = fields_[static_cast<size_t>(unseen - seen_.begin())].name;
  return is_array() ? str("ends before its ", name) : str("key '", name, "' is missing");
}

std::string JsonRecord::position() const { return in_field_ ? "." + fields_[current_].name : ""; }

std::string JsonList::unexpected(const char* what) {
  ++count_;
  return str(what, "; expected ", named(element_.is_array()));
}

std::string JsonList::text(std::string&) { return unexpected("a string"); }
std::string JsonList::number(int64_t) { return unexpected("a number"); }
std::string JsonList::boolean(bool) { return unexpected("true or false"); }

std::string JsonList::open(bool is_array, JsonScope*& inside) {
  if (is_array != element_.is_array()) return unexpected(named(is_array));
  if (++count_ > limit_) return str("more than ", limit_, " elements");
  inside = &element_;
  return "";
}

std::string JsonList::position() const { return count_ > 0 ? str("[", count_ - 1, "]") : ""; }

std::string JsonNumbers::number(int64_t value) {
  if (values_.size() == limit_) return str("more than ", limit_, " numbers");
  values_.push_back(value);
  return "";
}

std::string JsonNumbers::position() const { return str("[", values_.size(), "]"); }

std::string JsonTexts::key(const std::string& key) {
  key_ = key;
  if (texts_.size() == limit_) return str("more than ", limit_, " texts");
  return texts_.emplace(key, "").second ? "" : "the key stands there twice";
}

std::string JsonTexts::text(std::string& value) {
  texts_[key_] = std::move(value);
  return "";
}

std::string JsonTexts::position() const { return "." + shortened(key_); }

}  // namespace titan::checkpoint::detail

namespace titan::data {
namespace {

constexpr size_t kMaxDepth = 64;

/// How deep lists and objects nest; of text that isn't JSON, any number.
size_t depth_of(std::string_view text) {
  size_t depth = 0, deepest = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"') in_string = !in_string;
    if (in_string) {
      if (c == '\\') ++i;
    } else if (c == '[' || c == '{') {
      deepest = std::max(deepest, ++depth);
    } else if ((c == ']' || c == '}') && depth > 0) {
      --depth;
    }
  }
  return deepest;
}

}  // namespace

JsonFile::JsonFile(std::filesystem::path path, const std::string& text) : path_(std::move(path)) {
  if (depth_of(text) > kMaxDepth) refuse(str("nested deeper than ", kMaxDepth));
  // The parser takes a NUL for the end of its input.
  if (text.find('\0') != text.npos) refuse("contains a NUL byte");
  tree_ = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!tree_.is_object()) refuse("not a JSON object");
}

}  // namespace titan::data

#include "core/json.h"

#include <algorithm>
#include <array>
#include <set>
#include <type_traits>

namespace titan {
namespace {

using nlohmann::json;

/// Counts what the parser has read: its events carry no position.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* at, size_t* count) : at_(at), count_(count) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    ++at_;
    ++*count_;
    return *this;
  }
  bool operator==(const CountingIterator& other) const { return at_ == other.at_; }
  bool operator!=(const CountingIterator& other) const { return at_ != other.at_; }

 private:
  const char* at_;
  size_t* count_;
};

/// nlohmann's handler: a call that returns false stops the parser.
struct Handler {
  JsonEvents& events;
  std::string problem;

  bool take(std::string what) {
    problem = std::move(what);
    return problem.empty();
  }
  bool null() { return take(events.null()); }
  bool boolean(bool value) { return take(events.boolean(value)); }
  bool number_integer(int64_t value) { return take(events.integer(value)); }
  bool number_unsigned(uint64_t value) {
    const bool fits = value <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    return take(fits ? events.integer(static_cast<int64_t>(value)) : events.large_integer(value));
  }
  bool number_float(double value, const std::string&) { return take(events.real(value)); }
  bool string(std::string& value) { return take(events.text(value)); }
  bool binary(json::binary_t&) { return true; }  // JSON text has none
  bool key(std::string& value) { return take(events.key(value)); }
  bool start_object(size_t) { return take(events.open(/*is_array=*/false)); }
  bool start_array(size_t) { return take(events.open(/*is_array=*/true)); }
  bool end_object() { return take(events.close()); }
  bool end_array() { return take(events.close()); }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) {
    return take(events.syntax_error(position, json_error_reason(error.what())));
  }
};

}  // namespace

std::string json_quoted(std::string_view text) {
  return json(text).dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace);
}

std::string json_error_reason(std::string_view what) {
  constexpr size_t kShown = 200;
  if (size_t at = what.find("] "); at != what.npos) what.remove_prefix(at + 2);
  if (what.starts_with("parse error at")) what.remove_prefix(std::min(what.find(": "), what.size() - 2) + 2);
  return std::string(what.substr(0, kShown));
}

std::string JsonEvents::large_integer(uint64_t value) { return str(value, " is no 64-bit integer"); }

std::string JsonEvents::syntax_error(size_t position, const std::string& reason) {
  return str("not valid JSON at byte ", position, ": ", reason);
}

std::string read_json(std::string_view text, JsonEvents& events) {
  // The parser takes a NUL for the end of its input.
  if (size_t nul = text.find('\0'); nul != text.npos) return events.syntax_error(nul + 1, "a NUL byte");
  Handler handler{events, {}};
  events.num_read_ = 0;
  json::sax_parse(CountingIterator(text.data(), &events.num_read_),
                  CountingIterator(text.data() + text.size(), &events.num_read_), &handler);
  return handler.problem;
}

// ---- objects and arrays of a fixed form

namespace {

const char* named(bool is_array) { return is_array ? "an array" : "an object"; }
const char* named(const JsonValue& value) {
  static constexpr std::array names = {"a string", "a number", "true or false"};
  return names[value.index()];
}

const char* expected(const JsonTarget& target) {
  if (std::holds_alternative<std::string*>(target)) return "a string";
  if (std::holds_alternative<int64_t*>(target)) return "an integer";
  if (std::holds_alternative<bool*>(target)) return "true or false";
  return named(std::get<JsonScope*>(target)->is_array());
}

/// Keys in messages are cut: a file may hold any.
std::string shortened(const std::string& key) { return key.size() <= 60 ? key : key.substr(0, 60) + "..."; }

/// Passes events to the innermost open scope, and adds the place to its problems.
class ScopeEvents final : public JsonEvents {
 public:
  explicit ScopeEvents(JsonScope& root) : root_(root) {}

  std::string null() override { return placed("null"); }
  std::string boolean(bool value) override { return take(value); }
  std::string integer(int64_t value) override { return take(value); }
  std::string large_integer(uint64_t value) override { return placed(JsonEvents::large_integer(value)); }
  std::string real(double value) override { return placed(JsonEvents::real(value)); }
  std::string text(std::string& value) override { return take(std::move(value)); }
  std::string key(std::string& key) override { return placed(open_.back()->key(key)); }

  std::string open(bool is_array) override {
    JsonScope* inside = &root_;
    std::string problem = !open_.empty() ? open_.back()->open(is_array, inside) : is_array ? kNoObject : "";
    if (!problem.empty()) return placed(std::move(problem));
    inside->begin();
    open_.push_back(inside);
    return "";
  }
  std::string close() override {
    std::string problem = placed(open_.back()->end());
    open_.pop_back();
    return problem;
  }

 private:
  std::string take(JsonValue value) {
    return placed(open_.empty() ? kNoObject : open_.back()->value(std::move(value)));
  }
  std::string placed(std::string problem) const {
    std::string place;
    if (problem.empty()) return problem;
    for (const JsonScope* scope : open_) place += scope->position();
    return place.empty() ? problem : str(place.substr(1), ": ", problem);  // without the root's own "."
  }

  const std::string kNoObject = "not an object";
  JsonScope& root_;
  std::vector<JsonScope*> open_;
};

}  // namespace

std::string JsonScope::key(const std::string&) { return "a key"; }
std::string JsonScope::value(JsonValue value) {
  const bool is_bool = std::holds_alternative<bool>(value);
  return str(named(value), is_bool ? ", where neither is expected" : ", where none is expected");
}
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
  const auto field = std::ranges::find(fields_, key, &Field::name);
  in_field_ = field != fields_.end();
  if (!in_field_) return str("unknown key '", shortened(key), "'");
  current_ = static_cast<size_t>(field - fields_.begin());
  if (seen_[current_]) return "duplicate key";
  seen_[current_] = true;
  return "";
}

// The values of an array have no keys: each is the next one.
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

std::string JsonRecord::value(JsonValue value) {
  const JsonTarget* target = nullptr;
  std::string problem = next(target);
  if (!problem.empty()) return problem;
  const auto put = [&](auto& held) {
    auto* const* place = std::get_if<std::remove_reference_t<decltype(held)>*>(target);
    if (place != nullptr) **place = std::move(held);
    return place != nullptr;
  };
  return std::visit(put, value) ? "" : str(named(value), "; expected ", expected(*target));
}

std::string JsonRecord::open(bool is_array, JsonScope*& inside) {
  const JsonTarget* target = nullptr;
  std::string problem = next(target);
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

std::string JsonList::value(JsonValue value) { return unexpected(named(value)); }

std::string JsonList::open(bool is_array, JsonScope*& inside) {
  if (is_array != element_.is_array()) return unexpected(named(is_array));
  if (++count_ > limit_) return str("more than ", limit_, " elements");
  inside = &element_;
  return "";
}

std::string JsonList::position() const { return count_ > 0 ? str("[", count_ - 1, "]") : ""; }

std::string JsonNumbers::value(JsonValue value) {
  const auto* number = std::get_if<int64_t>(&value);
  if (number == nullptr) return JsonScope::value(std::move(value));
  if (values_.size() == limit_) return str("more than ", limit_, " numbers");
  values_.push_back(*number);
  return "";
}

std::string JsonNumbers::position() const { return str("[", values_.size(), "]"); }

std::string JsonTexts::key(const std::string& key) {
  key_ = key;
  if (texts_.size() == limit_) return str("more than ", limit_, " texts");
  return texts_.emplace(key, "").second ? "" : "duplicate key";
}

std::string JsonTexts::value(JsonValue value) {
  auto* text = std::get_if<std::string>(&value);
  if (text == nullptr) return JsonScope::value(std::move(value));
  texts_[key_] = std::move(*text);
  return "";
}

std::string JsonTexts::position() const { return "." + shortened(key_); }

std::string read_json(std::string_view text, JsonScope& object) {
  ScopeEvents events(object);
  return read_json(text, static_cast<JsonEvents&>(events));
}

// ---- leaves

namespace {

// The memory that leaves may take: this many times the text, and a constant. A tensor's entry in an index
// takes twice its text; only thousands of short numbers below a long key take much more.
constexpr size_t kMaxTimesText = 16;
constexpr size_t kAlwaysAllowed = size_t{1} << 20;

bool has_control_character(const std::string& text) {
  return std::any_of(text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; });
}

class LeafEvents final : public JsonEvents {
 public:
  explicit LeafEvents(size_t max_memory) : memory_left_(max_memory) {}

  std::string null() override { return leaf({}); }
  std::string boolean(bool value) override { return leaf(value); }
  std::string integer(int64_t value) override { return leaf(value); }
  std::string real(double value) override { return leaf(value); }
  std::string text(std::string& value) override { return leaf(std::move(value)); }

  std::string key(std::string& key) override {
    if (has_control_character(key)) return "a key contains control characters";
    if (!levels_.back().keys.insert(key).second) return str("duplicate key '", key, "'");
    path_.back() = key;
    return "";
  }
  std::string open(bool is_array) override {
    if (levels_.empty() && is_array) return "not a JSON object";
    if (levels_.size() == kMaxJsonDepth) return str("nested deeper than ", kMaxJsonDepth);
    next_element();
    levels_.push_back({.is_array = is_array});
    path_.emplace_back();
    return "";
  }
  std::string close() override {
    levels_.pop_back();
    path_.pop_back();
    return "";
  }

  JsonLeaves leaves;

 private:
  struct Level {
    bool is_array = false;
    size_t count = 0;
    std::set<std::string> keys = {};
  };

  std::string leaf(JsonScalar value) {
    if (levels_.empty()) return "not a JSON object";
    next_element();
    size_t memory = sizeof(JsonLeaves::value_type);
    for (const std::string& key : path_) memory += sizeof key + key.size();
    if (memory > memory_left_) return "too many values for a file of this size, or keys too long";
    memory_left_ -= memory;
    leaves.emplace(path_, std::move(value));
    return "";
  }

  void next_element() {
    if (!levels_.empty() && levels_.back().is_array) path_.back() = std::to_string(levels_.back().count++);
  }

  size_t memory_left_;
  std::vector<Level> levels_;
  JsonPath path_;
};

}  // namespace

JsonLeaves read_json_leaves(std::string_view text, size_t max_bytes, const std::string& file) {
  if (text.size() > max_bytes)
    throw ConfigError(str(file, ": ", text.size(), " bytes; at most ", max_bytes, " are allowed"));
  LeafEvents events(kAlwaysAllowed + kMaxTimesText * text.size());
  const std::string problem = read_json(text, events);
  if (!problem.empty()) throw ConfigError(str(file, ": ", problem));
  return std::move(events.leaves);
}

// ---- trees

JsonFile::JsonFile(std::filesystem::path path, std::string_view text) : path_(std::move(path)) {
  std::string problem;
  tree_ = parse_json(text, &problem);
  if (!problem.empty()) refuse(problem);
  if (!tree_.is_object()) refuse("not a JSON object");
}

}  // namespace titan

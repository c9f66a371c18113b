#include <algorithm>
#include <utility>

#include "checkpoint/strict_json.h"
#include "titan/core/error.h"

namespace titan::checkpoint::detail {
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

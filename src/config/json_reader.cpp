#include <nlohmann/json.hpp>
#include <set>

#include "config/document.h"
#include "titan/config/table.h"
#include "titan/core/error.h"

namespace titan::config {
namespace {

using Json = nlohmann::json;

/// Counts what the parser has consumed: its events carry no position.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* at, size_t* consumed) : at_(at), consumed_(consumed) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    ++at_;
    ++*consumed_;
    return *this;
  }
  bool operator==(const CountingIterator& other) const { return at_ == other.at_; }
  bool operator!=(const CountingIterator& other) const { return at_ != other.at_; }

 private:
  const char* at_;
  size_t* consumed_;
};

/// "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error while ...": the place is
/// ours to give.
std::string reason_of(std::string_view what) {
  if (size_t at = what.find("] "); at != std::string_view::npos) what.remove_prefix(at + 2);
  if (what.starts_with("parse error at")) what.remove_prefix(std::min(what.find(": "), what.size() - 2) + 2);
  return std::string(what);
}

/// Receives the parser's events and keeps a stack of open objects and lists.
class Reader {
 public:
  Reader(std::string_view text, const std::string& file, const size_t& consumed)
      : text_(text), consumed_(consumed), cursor_{file, 1, 1} {}

  Document take() { return std::move(document_); }

  bool null() { return value({Raw::Null{}}); }
  bool boolean(bool given) { return value({given}); }
  bool number_integer(int64_t given) { return value({given}); }
  bool number_unsigned(uint64_t given) {
    bool fits = given <= static_cast<uint64_t>(INT64_MAX);
    return value(fits ? Raw{static_cast<int64_t>(given)} : Raw{static_cast<double>(given)});
  }
  bool number_float(double given, const std::string&) { return value({given}); }
  bool string(std::string& given) { return value({std::move(given)}); }
  bool binary(Json::binary_t&) { return true; }  // not in JSON text

  bool key(std::string& name) {
    if (skipped_ == 0) {
      key_ = joined(open_.back().name, name);
      key_place_ = token_place();
    }
    return token_done();
  }

  bool start_object(size_t) {
    check_depth();
    if (skipped_ > 0 || (!open_.empty() && open_.back().is_list)) {
      ++skipped_;
    } else if (open_.empty()) {
      open_.push_back({});
    } else {
      note_key();
      document_.headings.push_back({key_, key_place_});
      open_.push_back({key_, key_place_});
    }
    return token_done();
  }

  bool end_object() {
    if (skipped_ == 0) {
      open_.pop_back();
    } else if (--skipped_ == 0) {
      open_.back().items.push_back({Raw::Other{"a table"}});
    }
    return token_done();
  }

  bool start_array(size_t) {
    check_root();
    check_depth();
    if (skipped_ > 0) {
      ++skipped_;
    } else {
      open_.push_back({key_, key_place_, true});
    }
    return token_done();
  }

  bool end_array() {
    if (skipped_ > 0) {
      --skipped_;
      return token_done();
    }
    Open list = std::move(open_.back());
    open_.pop_back();
    key_ = std::move(list.name);
    key_place_ = std::move(list.place);
    return value({std::move(list.items)});
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) {
    fail(advance(position > 0 ? position - 1 : 0), "not JSON: " + reason_of(error.what()));
  }

 private:
  struct Open {
    std::string name = {};
    Place place = {};
    bool is_list = false;
    Raw::List items = {};
    std::set<std::string> keys = {};
  };

  bool value(Raw raw) {
    check_root();
    Open& open = open_.back();
    if (skipped_ == 0 && open.is_list) {
      open.items.push_back(std::move(raw));
    } else if (skipped_ == 0 && note_key()) {
      document_.leaves.push_back({key_, key_place_, std::move(raw)});
    }
    return token_done();
  }

  /// False, and a problem, when the open object has the key already.
  bool note_key() {
    if (open_.back().keys.insert(key_).second) return true;
    document_.problems.push_back(str(to_text(key_place_), ": ", key_, ": given twice in the same table"));
    return false;
  }

  void check_root() {
    if (open_.empty()) fail(cursor_, "a config is an object: {\"section\": {\"key\": value}}");
  }

  void check_depth() {
    if (open_.size() + skipped_ >= kMaxDepth) fail(token_place(), str("nested deeper than ", kMaxDepth));
  }

  [[noreturn]] void fail(const Place& place, const std::string& reason) {
    throw ConfigError(str(to_text(place), ": ", reason));
  }

  // The parser has read just past the token of an event (one byte more after a number, which can't start a
  // token), so the token starts behind the last event's end and what separates tokens.
  Place token_place() {
    return advance(std::min(text_.find_first_not_of(" \t\r\n,:", last_end_), text_.size()));
  }
  bool token_done() {
    last_end_ = consumed_;
    return true;
  }

  /// Moves the cursor on to a byte; tokens come in order, so that a file is counted through once.
  Place advance(size_t offset) {
    if (offset > cursor_at_) {
      move(cursor_, text_.substr(cursor_at_, offset - cursor_at_));
      cursor_at_ = offset;
    }
    return cursor_;
  }

  std::string_view text_;
  const size_t& consumed_;
  Document document_;
  std::vector<Open> open_;
  size_t skipped_ =
      0;  // open objects and lists inside an object inside a list: none of them can be a setting
  std::string key_;
  Place key_place_;
  size_t last_end_ = 0;
  Place cursor_;
  size_t cursor_at_ = 0;
};

}  // namespace

Document read_json(std::string_view text, const std::string& file) {
  // The parser takes a NUL for the end of its input.
  if (size_t zero = text.find('\0'); zero != text.npos) {
    Place place{file, 1, 1};
    move(place, text.substr(0, zero));
    throw ConfigError(str(to_text(place), ": not JSON: a NUL byte"));
  }
  size_t consumed = 0;
  Reader reader(text, file, consumed);
  CountingIterator begin(text.data(), &consumed);
  CountingIterator end(text.data() + text.size(), &consumed);
  Json::sax_parse(begin, end, &reader);
  return reader.take();
}

}  // namespace titan::config

#include <algorithm>
#include <set>

#include "config/document.h"
#include "core/json.h"
#include "titan/core/error.h"

namespace titan::config {
namespace {

class Reader final : public JsonEvents {
 public:
  Reader(std::string_view text, const std::string& file) : text_(text), cursor_{file, 1, 1} {}

  std::string null() override { return value({Raw::Null{}}); }
  std::string boolean(bool given) override { return value({given}); }
  std::string integer(int64_t given) override { return value({given}); }
  std::string large_integer(uint64_t given) override { return value({static_cast<double>(given)}); }
  std::string real(double given) override { return value({given}); }
  std::string text(std::string& given) override { return value({std::move(given)}); }

  std::string key(std::string& name) override {
    if (skipped_ == 0) {
      key_ = joined(open_.back().name, name);
      key_place_ = token_place();
    }
    return token_done();
  }

  std::string open(bool is_array) override {
    if (is_array && open_.empty()) return no_object();
    if (open_.size() + skipped_ >= kMaxDepth)
      return problem(token_place(), str("nested deeper than ", kMaxDepth));
    const bool in_list = !open_.empty() && open_.back().is_list;
    if (skipped_ > 0 || (in_list && !is_array)) {
      ++skipped_;
    } else {
      if (!is_array && !open_.empty()) {
        note_key();
        document.headings.push_back({key_, key_place_});
      }
      open_.push_back({key_, key_place_, is_array});
    }
    return token_done();
  }

  std::string close() override {
    if (skipped_ > 0) {
      if (--skipped_ == 0) open_.back().items.push_back({Raw::Other{"a table"}});
      return token_done();
    }
    Open closed = std::move(open_.back());
    open_.pop_back();
    if (!closed.is_list) return token_done();
    key_ = std::move(closed.name);
    key_place_ = std::move(closed.place);
    return value({std::move(closed.items)});
  }

  std::string syntax_error(size_t position, const std::string& reason) override {
    return problem(advance_to(position > 0 ? position - 1 : 0), "not JSON: " + reason);
  }

  Document document;

 private:
  struct Open {
    std::string name = {};
    Place place = {};
    bool is_list = false;
    Raw::List items = {};
    std::set<std::string> keys = {};
  };

  std::string value(Raw raw) {
    if (open_.empty()) return no_object();
    if (skipped_ == 0 && open_.back().is_list) {
      open_.back().items.push_back(std::move(raw));
    } else if (skipped_ == 0 && note_key()) {
      document.leaves.push_back({key_, key_place_, std::move(raw)});
    }
    return token_done();
  }

  /// Returns false, and adds a problem, if the open object already has the key.
  bool note_key() {
    if (open_.back().keys.insert(key_).second) return true;
    document.problems.push_back(str(to_text(key_place_), ": ", key_, ": given twice in the same table"));
    return false;
  }

  std::string problem(const Place& place, const std::string& reason) const {
    return str(to_text(place), ": ", reason);
  }
  std::string no_object() const {
    return problem(cursor_, "a config is an object: {\"section\": {\"key\": value}}");
  }

  // The parser has read just past the current token (and one byte more after a number, which can't start a
  // token), so the token starts after the end of the previous one and the separators.
  Place token_place() {
    return advance_to(std::min(text_.find_first_not_of(" \t\r\n,:", last_end_), text_.size()));
  }
  std::string token_done() {
    last_end_ = num_read();
    return "";
  }

  /// Moves the cursor to a byte. Tokens come in order, so each byte is counted once.
  Place advance_to(size_t offset) {
    if (offset > cursor_at_) {
      advance(cursor_, text_.substr(cursor_at_, offset - cursor_at_));
      cursor_at_ = offset;
    }
    return cursor_;
  }

  std::string_view text_;
  std::vector<Open> open_;
  size_t skipped_ = 0;  // open objects and lists inside an object in a list, where no setting can be
  std::string key_;
  Place key_place_;
  size_t last_end_ = 0;
  Place cursor_;
  size_t cursor_at_ = 0;
};

}  // namespace

Document read_json(std::string_view text, const std::string& file) {
  Reader reader(text, file);
  const std::string problem = titan::read_json(text, reader);
  if (!problem.empty()) throw ConfigError(problem);
  return std::move(reader.document);
}

}  // namespace titan::config

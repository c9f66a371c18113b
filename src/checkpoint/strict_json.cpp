#include "checkpoint/strict_json.h"

#include <limits>

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

}  // namespace titan::checkpoint::detail

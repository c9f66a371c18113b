#include "checkpoint/hugging_face/json_leaves.h"

#include <algorithm>
#include <limits>
#include <set>

#include <nlohmann/json.hpp>

#include "titan/core/error.h"

namespace titan::detail {
namespace {

using nlohmann::json;

constexpr size_t kMaxDepth = 64;
// The memory that leaves may take: so many times the text, and so much beside. A tensor's entry in an index
// takes twice its text; what takes much more is a list of thousands of short numbers below a long key.
constexpr size_t kMaxTimesText = 16;
constexpr size_t kAlwaysAllowed = size_t{1} << 20;

bool has_control_character(const std::string& text) {
  return std::any_of(text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; });
}

class LeafEvents final : public nlohmann::json_sax<json> {
 public:
  explicit LeafEvents(size_t max_memory) : memory_left_(max_memory) {}

  JsonLeaves leaves;
  std::string problem;

  bool null() override { return leaf({}); }
  bool boolean(bool value) override { return leaf(value); }
  bool number_integer(number_integer_t value) override { return leaf(int64_t{value}); }
  bool number_unsigned(number_unsigned_t value) override {
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
      return fail(str(value, " is no 64-bit integer"));
    return leaf(static_cast<int64_t>(value));
  }
  bool number_float(number_float_t value, const string_t&) override { return leaf(value); }
  bool string(string_t& value) override { return leaf(value); }
  bool binary(binary_t&) override { return fail("binary data"); }
  bool start_object(std::size_t) override { return open(/*is_array=*/false); }
  bool start_array(std::size_t) override { return open(/*is_array=*/true); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& value) override {
    if (has_control_character(value)) return fail("a key contains control characters");
    if (!levels_.back().keys.insert(value).second) return fail(str("key '", value, "' occurs twice"));
    path_.back() = value;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    return fail(str("not valid JSON at byte ", position, ": ", error.what()));
  }

 private:
  struct Level {
    bool is_array = false;
    size_t count = 0;
    std::set<std::string> keys;
  };

  bool open(bool is_array) {
    if (levels_.empty() && is_array) return fail("not a JSON object");
    if (levels_.size() == kMaxDepth) return fail(str("nested deeper than ", kMaxDepth));
    next_element();
    levels_.push_back({.is_array = is_array, .count = 0, .keys = {}});
    path_.emplace_back();
    return true;
  }

  bool close() {
    levels_.pop_back();
    path_.pop_back();
    return true;
  }

  bool leaf(HfValue value) {
    if (levels_.empty()) return fail("not a JSON object");
    next_element();
    const size_t memory = memory_of_leaf();
    if (memory > memory_left_) return fail("too many values for a file of this size, or keys too long");
    memory_left_ -= memory;
    leaves.emplace(path_, std::move(value));
    return true;
  }

  size_t memory_of_leaf() const {
    size_t memory = sizeof(JsonLeaves::value_type);
    for (const std::string& key : path_) memory += sizeof key + key.size();
    return memory;
  }

  void next_element() {
    if (!levels_.empty() && levels_.back().is_array) path_.back() = std::to_string(levels_.back().count++);
  }

  bool fail(std::string message) {
    problem = std::move(message);
    return false;
  }

  size_t memory_left_;
  std::vector<Level> levels_;
  JsonPath path_;
};

}  // namespace

JsonLeaves parse_json_leaves(std::string_view text, size_t max_bytes, const std::string& file) {
  if (text.size() > max_bytes)
    throw ConfigError(str(file, ": ", text.size(), " bytes; at most ", max_bytes, " are allowed"));
  if (text.find('\0') != std::string_view::npos) throw ConfigError(str(file, ": contains a NUL byte"));
  LeafEvents events(kAlwaysAllowed + kMaxTimesText * text.size());
  if (!json::sax_parse(text.begin(), text.end(), &events, json::input_format_t::json, /*strict=*/true))
    throw ConfigError(str(file, ": ", events.problem));
  return std::move(events.leaves);
}

}  // namespace titan::detail

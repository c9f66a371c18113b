#pragma once

// Writes Python values for pickle.load(): dictionaries, lists, integers and strings. Protocol 2, with opcodes
// that PyTorch's memory viewer reads too.

#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <utility>

namespace titan {

/// Writes one value, depth first. An element of a list is written and then appended; a dictionary's key and
/// value are written and then set.
///
///   pickle.begin_dict();
///   pickle.text("sizes");
///   pickle.begin_list();
///   pickle.integer(3);
///   pickle.append();
///   pickle.set_item();
///   pickle.finish();  // {"sizes": [3]}
class PickleWriter {
 public:
  void integer(int64_t value) {
    const bool fits =
        value >= std::numeric_limits<int32_t>::min() && value <= std::numeric_limits<int32_t>::max();
    opcode(fits ? 'J' : '\x8a');  // BININT; LONG1, whose length follows
    if (!fits) number(sizeof(value), 1);
    number(static_cast<uint64_t>(value), fits ? 4 : 8);
  }
  void boolean(bool value) { opcode(value ? '\x88' : '\x89'); }
  /// A repeated string is written as a reference.
  void text(std::string_view value) {
    const auto known = texts_.find(value);
    if (known != texts_.end()) return again(known->second);
    opcode('X');  // BINUNICODE
    number(value.size(), 4);
    bytes_ += value;
    texts_.emplace(value, remember());
  }
  void begin_list() { opcode(']'); }
  void append() { opcode('a'); }
  void begin_dict() { opcode('}'); }
  void set_item() { opcode('s'); }

  /// Remembers the last value; again() writes a reference to it, so that Python has one object.
  uint32_t remember() {
    opcode('r');  // LONG_BINPUT
    number(num_remembered_, 4);
    return num_remembered_++;
  }
  void again(uint32_t remembered) {
    opcode('j');  // LONG_BINGET
    number(remembered, 4);
  }

  /// Writes key and value, and sets the item.
  void item(std::string_view key, int64_t value) {
    text(key);
    integer(value);
    set_item();
  }
  void item(std::string_view key, std::string_view value) {
    text(key);
    text(value);
    set_item();
  }

  /// Returns the bytes; the writer is used up.
  std::string finish() {
    opcode('.');
    return std::move(bytes_);
  }

 private:
  void opcode(char code) { bytes_ += code; }
  // Little-endian.
  void number(uint64_t value, int num_bytes) {
    for (int i = 0; i < num_bytes; ++i) bytes_ += static_cast<char>(value >> (8 * i) & 0xff);
  }

  std::string bytes_ = "\x80\x02";
  std::map<std::string, uint32_t, std::less<>> texts_;
  uint32_t num_remembered_ = 0;
};

}  // namespace titan

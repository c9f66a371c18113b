#pragma once

// Writes Python values for pickle.load(): dictionaries, lists, integers and strings.

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

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
  PickleWriter();

  void integer(int64_t value);
  void boolean(bool value);
  /// A repeated string is written as a reference.
  void text(std::string_view value);
  void begin_list();
  void append();
  void begin_dict();
  void set_item();

  /// The value written last; again() writes a reference to it, so that Python has one object.
  uint32_t remember();
  void again(uint32_t remembered);

  /// Writes key and value, and sets the item.
  void item(std::string_view key, int64_t value);
  void item(std::string_view key, std::string_view value);

  /// Returns the bytes; the writer is used up.
  std::string finish();

 private:
  void opcode(char code) { bytes_ += code; }
  void number(uint64_t value, int num_bytes);

  std::string bytes_;
  std::map<std::string, uint32_t, std::less<>> texts_;
  uint32_t num_remembered_ = 0;
};

}  // namespace titan

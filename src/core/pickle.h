#pragma once

// Python values for pickle.load(): dictionaries, lists, integers and texts.

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace titan {

/// Writes one value, depth first. A container is begun, filled, and done when something else is written into
/// the container around it: an element of a list is written and then append()ed, a dictionary's key and value
/// are written and then set.
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
  /// Texts that were written before are named by their number.
  void text(std::string_view value);
  void begin_list();
  void append();
  void begin_dict();
  void set_item();

  /// What was written last, to be written once more by again(): one object of Python's.
  uint32_t remember();
  void again(uint32_t remembered);

  /// `key: value`, set.
  void item(std::string_view key, int64_t value);
  void item(std::string_view key, std::string_view value);

  /// The bytes. Nothing may be written after it.
  std::string finish();

 private:
  void opcode(char code) { bytes_ += code; }
  void number(uint64_t value, int num_bytes);

  std::string bytes_;
  std::map<std::string, uint32_t, std::less<>> texts_;
  uint32_t num_remembered_ = 0;
};

}  // namespace titan

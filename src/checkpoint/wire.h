#pragma once

// Numbers and texts in one string, for what ranks of one build send each other.

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include "titan/core/error.h"

namespace titan::checkpoint::detail {

class WireWriter {
 public:
  void number(int64_t value) { bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value)); }
  void text(std::string_view value) {
    number(static_cast<int64_t>(value.size()));
    bytes_.append(value);
  }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

/// Throws Error where less is left than is asked for.
class WireReader {
 public:
  explicit WireReader(std::string_view bytes) : left_(bytes) {}
  bool done() const { return left_.empty(); }
  int64_t number() {
    int64_t value = 0;
    std::memcpy(&value, next(sizeof(value)).data(), sizeof(value));
    return value;
  }
  std::string text() {
    const int64_t size = number();
    return std::string(next(static_cast<size_t>(size)));
  }

 private:
  std::string_view next(size_t size) {
    TITAN_CHECK(size <= left_.size(), "a message of another rank ends early: the ranks run different builds");
    const std::string_view part = left_.substr(0, size);
    left_.remove_prefix(size);
    return part;
  }

  std::string_view left_;
};

}  // namespace titan::checkpoint::detail

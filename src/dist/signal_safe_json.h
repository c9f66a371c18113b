#pragma once

// JSON written by a signal's handler: to a descriptor, through memory that was there before, by write(2)
// alone.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace titan::dist {

class SignalSafeJson {
 public:
  SignalSafeJson(int file, std::span<char> buffer) : file_(file), buffer_(buffer) {}

  /// Brackets, commas, keys: as they are.
  void raw(std::string_view text) noexcept;
  void number(int64_t value) noexcept;
  /// In quotes. Bytes that JSON doesn't take are written as escapes, those above 127 as a question mark.
  void text(std::string_view value) noexcept;
  /// `, "key": `
  void key(std::string_view name) noexcept;
  /// Whatever is left. Returns the errno of the first write that failed, or 0.
  int flush() noexcept;

 private:
  void put(char byte) noexcept;

  int file_;
  std::span<char> buffer_;
  size_t used_ = 0;
  int error_ = 0;
};

}  // namespace titan::dist

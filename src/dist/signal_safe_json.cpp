#include "signal_safe_json.h"

#include <unistd.h>

#include <cerrno>

namespace titan::dist {

void SignalSafeJson::put(char byte) noexcept {
  if (used_ == buffer_.size()) flush();
  buffer_[used_++] = byte;
}

void SignalSafeJson::raw(std::string_view text) noexcept {
  for (const char byte : text) put(byte);
}

void SignalSafeJson::number(int64_t value) noexcept {
  char digits[20];
  size_t count = 0;
  auto left = value < 0 ? ~static_cast<uint64_t>(value) + 1 : static_cast<uint64_t>(value);
  do digits[count++] = static_cast<char>('0' + left % 10);
  while ((left /= 10) > 0);
  if (value < 0) put('-');
  while (count > 0) put(digits[--count]);
}

void SignalSafeJson::text(std::string_view value) noexcept {
  put('"');
  for (const char byte : value) {
    const auto code = static_cast<unsigned char>(byte);
    if (byte == '"' || byte == '\\') {
      put('\\');
      put(byte);
    } else if (code < 0x20) {
      raw("\\u00");
      put("0123456789abcdef"[code >> 4]);
      put("0123456789abcdef"[code & 15]);
    } else {
      put(code < 0x7f ? byte : '?');
    }
  }
  put('"');
}

void SignalSafeJson::key(std::string_view name) noexcept {
  raw(", ");
  text(name);
  raw(": ");
}

int SignalSafeJson::flush() noexcept {
  size_t done = 0;
  while (done < used_ && error_ == 0) {
    const ssize_t written = ::write(file_, buffer_.data() + done, used_ - done);
    if (written > 0)
      done += static_cast<size_t>(written);
    else if (written == 0 || errno != EINTR)
      error_ = written == 0 ? EIO : errno;
  }
  used_ = 0;
  return error_;
}

}  // namespace titan::dist

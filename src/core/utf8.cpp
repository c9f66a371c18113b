#include "core/utf8.h"

#include <cstdint>
#include <cstring>

namespace titan {
namespace {

// A valid character or a maximal ill-formed part, `size` bytes long.
struct Step {
  size_t size;
  bool valid;
};

// The number of continuation bytes after a lead byte, and the range of the first one (table 3-7 of the
// Unicode standard).
struct Lead {
  int continuations;  // -1: not a lead byte
  unsigned char low = 0x80;
  unsigned char high = 0xBF;
};

Lead lead_of(unsigned char byte) {
  if (byte < 0x80) return {0};
  if (byte < 0xC2) return {-1};
  if (byte < 0xE0) return {1};
  if (byte == 0xE0) return {2, 0xA0, 0xBF};
  if (byte == 0xED) return {2, 0x80, 0x9F};
  if (byte < 0xF0) return {2};
  if (byte == 0xF0) return {3, 0x90, 0xBF};
  if (byte < 0xF4) return {3};
  if (byte == 0xF4) return {3, 0x80, 0x8F};
  return {-1};
}

Step step(std::string_view text, size_t position) {
  Lead lead = lead_of(static_cast<unsigned char>(text[position]));
  if (lead.continuations < 0) return {1, false};
  for (int i = 1; i <= lead.continuations; ++i) {
    if (position + i >= text.size()) return {static_cast<size_t>(i), false};
    auto byte = static_cast<unsigned char>(text[position + i]);
    if (byte < lead.low || byte > lead.high) return {static_cast<size_t>(i), false};
    lead.low = 0x80;
    lead.high = 0xBF;
  }
  return {static_cast<size_t>(lead.continuations + 1), true};
}

size_t skip_ascii(std::string_view text, size_t position) {
  for (uint64_t word; position + 8 <= text.size(); position += 8) {
    std::memcpy(&word, text.data() + position, 8);
    if (word & 0x8080808080808080ull) break;
  }
  return position;
}

}  // namespace

size_t valid_utf8_prefix(std::string_view text) {
  for (size_t position = 0;;) {
    position = skip_ascii(text, position);
    if (position >= text.size()) return text.size();
    Step found = step(text, position);
    if (!found.valid) return position;
    position += found.size;
  }
}

std::string replace_invalid_utf8(std::string_view text) {
  std::string result;
  result.reserve(text.size() + 16);
  while (!text.empty()) {
    size_t valid = valid_utf8_prefix(text);
    result.append(text.substr(0, valid));
    text.remove_prefix(valid);
    if (text.empty()) break;
    result.append("\xEF\xBF\xBD");
    text.remove_prefix(step(text, 0).size);
  }
  return result;
}

void append_utf8(char32_t c, std::string& text) {
  auto put = [&](char32_t byte) { text.push_back(static_cast<char>(byte)); };
  if (c < 0x80) return put(c);
  if (c < 0x800) {
    put(0xC0 | c >> 6);
  } else if (c < 0x10000) {
    put(0xE0 | c >> 12);
    put(0x80 | (c >> 6 & 0x3F));
  } else {
    put(0xF0 | c >> 18);
    put(0x80 | (c >> 12 & 0x3F));
    put(0x80 | (c >> 6 & 0x3F));
  }
  put(0x80 | (c & 0x3F));
}

char32_t next_code_point(std::string_view text, size_t& position) {
  auto lead = static_cast<unsigned char>(text[position++]);
  if (lead < 0x80) return lead;
  int continuations = lead < 0xE0 ? 1 : lead < 0xF0 ? 2 : 3;
  char32_t result = lead & (0x3F >> continuations);
  for (int i = 0; i < continuations; ++i)
    result = result << 6 | (static_cast<unsigned char>(text[position++]) & 0x3F);
  return result;
}

}  // namespace titan

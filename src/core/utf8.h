#pragma once

// UTF-8: checking, repairing, reading and appending characters.

#include <string>
#include <string_view>

namespace titan {

/// The length of the longest prefix of `text` that is valid UTF-8 (no surrogates, no overlong forms, at most
/// U+10FFFF).
size_t valid_utf8_prefix(std::string_view text);

/// `text` with every maximal ill-formed part replaced by one U+FFFD: Python's `errors="replace"` and the
/// Unicode standard's recommendation (section 3.9).
std::string replace_invalid_utf8(std::string_view text);

/// Appends `code_point` as UTF-8.
void append_utf8(char32_t code_point, std::string& text);

/// Reads the code point at `position` of valid UTF-8 and moves `position` past it.
char32_t next_code_point(std::string_view text, size_t& position);

/// Whether `byte` can begin a character: it isn't a continuation byte.
constexpr bool starts_character(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) != 0x80; }

}  // namespace titan

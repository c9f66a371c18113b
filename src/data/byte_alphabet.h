#pragma once

// GPT-2's printable alphabet: a vocabulary file writes every byte as one visible character ("Ġ" is a space).

#include <array>
#include <optional>
#include <string>
#include <string_view>

namespace titan::data {

/// The code point that stands for each byte.
const std::array<char32_t, 256>& byte_alphabet();

/// The bytes that `token` stands for; nothing when it holds a character outside the alphabet.
std::optional<std::string> bytes_from_alphabet(std::string_view token);

}  // namespace titan::data

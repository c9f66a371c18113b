#include "byte_alphabet.h"

#include "utf8.h"

namespace titan::data {
namespace {

constexpr char32_t kAlphabetEnd = 0x100 + 68;  // 68 bytes have no visible character of their own

// Visible Latin-1 characters stand for themselves, the others for U+0100 onwards, in order.
constexpr std::array<char32_t, 256> make_alphabet() {
  std::array<char32_t, 256> alphabet{};
  char32_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    bool visible = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    alphabet[byte] = visible ? static_cast<char32_t>(byte) : next++;
  }
  return alphabet;
}

constexpr std::array<char32_t, 256> kAlphabet = make_alphabet();

constexpr std::array<int, kAlphabetEnd> make_inverse() {
  std::array<int, kAlphabetEnd> inverse{};
  for (int& byte : inverse) byte = -1;
  for (int byte = 0; byte < 256; ++byte) inverse[kAlphabet[byte]] = byte;
  return inverse;
}

constexpr std::array<int, kAlphabetEnd> kInverse = make_inverse();

}  // namespace

const std::array<char32_t, 256>& byte_alphabet() { return kAlphabet; }

std::optional<std::string> bytes_from_alphabet(std::string_view token) {
  std::string bytes;
  for (size_t position = 0; position < token.size();) {
    char32_t c = next_code_point(token, position);
    if (c >= kAlphabetEnd || kInverse[c] < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(kInverse[c]));
  }
  return bytes;
}

}  // namespace titan::data

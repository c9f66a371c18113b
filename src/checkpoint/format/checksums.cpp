#include <cstring>

#include "checkpoint/format/rank_file.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "titan/checkpoint/manifest.h"

namespace titan::checkpoint {

std::string digest_of(std::string_view bytes) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes.data(), bytes.size()));
  std::string digits;
  for (unsigned char byte : canonical.digest) {
    digits += "0123456789abcdef"[byte >> 4];
    digits += "0123456789abcdef"[byte & 15];
  }
  return digits;
}

namespace detail {
namespace {

// Adding one to the last place of an exponent carries into the sign bit exactly if the exponent is all ones.
// Every instruction set can vectorize that, unlike comparisons of 64-bit words.
template <class Word>
bool no_full_exponent(std::span<const std::byte> bytes, Word exponent, Word last_place) {
  constexpr Word kSign = static_cast<Word>(Word{1} << (8 * sizeof(Word) - 1));
  Word carried = 0;
  for (size_t i = 0; i < bytes.size() / sizeof(Word); ++i) {
    Word word;
    std::memcpy(&word, bytes.data() + i * sizeof word, sizeof word);
    carried = static_cast<Word>(carried | static_cast<Word>((word & exponent) + last_place));
  }
  return (carried & kSign) == 0;
}

}  // namespace

uint64_t checksum_of(std::span<const std::byte> block) { return XXH3_64bits(block.data(), block.size()); }

bool all_finite(std::span<const std::byte> bytes, at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return no_full_exponent<uint64_t>(bytes, 0x7ff0'0000'0000'0000, 0x0010'0000'0000'0000);
    case at::kFloat:
      return no_full_exponent<uint32_t>(bytes, 0x7f80'0000, 0x0080'0000);
    case at::kHalf:
      return no_full_exponent<uint16_t>(bytes, 0x7c00, 0x0400);
    case at::kBFloat16:
      return no_full_exponent<uint16_t>(bytes, 0x7f80, 0x0080);
    case at::kFloat8_e5m2:
      return no_full_exponent<uint8_t>(bytes, 0x7c, 0x04);
    case at::kFloat8_e4m3fn:  // has no infinities, and one NaN: all ones
      return no_full_exponent<uint8_t>(bytes, 0x7f, 0x01);
    default:
      return true;
  }
}

}  // namespace detail
}  // namespace titan::checkpoint

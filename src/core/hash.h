#pragma once

// Hashes and checksums.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace titan {

/// XXH3 of the bytes, for fingerprints and indexes: collisions by chance are rare, but easy to construct.
uint64_t hash_bytes(std::string_view bytes, uint64_t seed = 0);

/// As 16 hexadecimal digits.
std::string hex(uint64_t value);

/// A bijective mix of all 64 bits (splitmix64's finalizer).
constexpr uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return x ^ x >> 31;
}

/// CRC-32C (Castagnoli, polynomial 0x1EDC6F41, reflected; RFC 3720 appendix B.4) of `bytes`.
inline uint32_t crc32c(std::string_view bytes) {
  static constexpr std::array<uint32_t, 256> kTable = [] {
    std::array<uint32_t, 256> table{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t remainder = byte;
      for (int bit = 0; bit < 8; ++bit) remainder = (remainder >> 1) ^ ((remainder & 1) ? 0x82F63B78u : 0u);
      table[byte] = remainder;
    }
    return table;
  }();
  uint32_t crc = ~0u;
  for (unsigned char byte : bytes) crc = kTable[(crc ^ byte) & 0xFF] ^ (crc >> 8);
  return ~crc;
}

}  // namespace titan

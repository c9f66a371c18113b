#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace titan::data {

/// XXH3 of the bytes; for fingerprints and indexes, where chance and not malice makes collisions.
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

}  // namespace titan::data

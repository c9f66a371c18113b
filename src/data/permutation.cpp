#include "titan/data/permutation.h"

#include <algorithm>
#include <bit>

#include "hash.h"
#include "titan/core/error.h"

namespace titan::data {

Permutation::Permutation(int64_t n, uint64_t seed, uint64_t stream) : n_(static_cast<uint64_t>(n)) {
  TITAN_CHECK(n >= 1, "a permutation of ", n, " things");
  // Two bits at least, so that both halves of the network have one.
  int bits = std::max(2, static_cast<int>(std::bit_width(n_ - 1)));
  low_bits_ = bits / 2;
  low_mask_ = (uint64_t{1} << low_bits_) - 1;
  high_mask_ = (uint64_t{1} << (bits - low_bits_)) - 1;
  uint64_t key = mix(mix(seed) ^ stream);
  for (uint64_t& round_key : keys_) round_key = key = mix(key);
}

// The halves may differ by a bit in width, so they stay in place and take turns instead of being swapped.
uint64_t Permutation::network(uint64_t x) const {
  uint64_t high = x >> low_bits_, low = x & low_mask_;
  for (int round = 0; round < kRounds; round += 2) {
    high ^= mix(low ^ keys_[round]) & high_mask_;
    low ^= mix(high ^ keys_[round + 1]) & low_mask_;
  }
  return high << low_bits_ | low;
}

int64_t Permutation::operator()(int64_t k) const {
  auto x = static_cast<uint64_t>(k);
  TITAN_INTERNAL_ASSERT(x < n_, k, " of ", n_);
  do x = network(x);
  while (x >= n_);
  return static_cast<int64_t>(x);
}

}  // namespace titan::data

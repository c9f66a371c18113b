#pragma once

// A pseudo-random order of n things that needs no memory and no state: ask for its k-th.

#include <cstdint>

namespace titan::data {

/// A bijection of [0, n) chosen by (seed, stream): a Feistel network over the smallest power of two that
/// holds n, applied again until the value falls inside (Black and Rogaway, "Ciphers with Arbitrary Finite
/// Domains", 2002). The same bits everywhere.
class Permutation {
 public:
  /// `n` at least 1.
  Permutation(int64_t n, uint64_t seed, uint64_t stream);

  /// The image of `k` in [0, n). About two network evaluations at most on average.
  int64_t operator()(int64_t k) const;

 private:
  static constexpr int kRounds = 8;
  uint64_t network(uint64_t x) const;

  uint64_t n_;
  int low_bits_;
  uint64_t low_mask_;
  uint64_t high_mask_;
  uint64_t keys_[kRounds];
};

}  // namespace titan::data

#pragma once

// What the kernels of random_block.cpp and random_avx512.cpp share.

#include <array>
#include <cstdint>

#include "nn/random_block.h"

namespace titan::nn {

using PhiloxKey = std::array<uint32_t, 2>;

/// Philox counters that one call takes, for two elements each.
inline constexpr int64_t kDrawCounters = 64;

/// The few that lie outside the centre are put aside in the first pass.
struct Outside {
  static constexpr int64_t kCapacity = 256, kWidest = 8;
  double p[kCapacity + kWidest];  // probabilities, then values; and room for a vector that isn't full
  double r[kCapacity + kWidest];  // what the formulas take
  int32_t where[kCapacity + kWidest];
};

#if defined(__x86_64__)
/// For processors with AVX-512 (F, DQ and VL): the uniforms of kDrawCounters counters, and a block of at most
/// Outside::kCapacity - Outside::kWidest normals, in place.
void uniforms_by_avx512(double* to, uint64_t first_counter, const PhiloxKey& key, const PhiloxKey& name);
void normals_by_avx512(double* z, int64_t count, const NormalDraw& draw, Outside& outside);
#endif

}  // namespace titan::nn

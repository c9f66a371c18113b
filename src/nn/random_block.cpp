#include "nn/random_block.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace titan::nn {

namespace {

using Lanes32 = int32_t __attribute__((vector_size(16)));

constexpr int64_t kLaneElements = 2 * kDrawCounters;

#if defined(__x86_64__)
#define TITAN_AVX2 __attribute__((target("avx2")))

// Four counters in the low halves of 64-bit lanes; the high halves are ignored.
struct FourCounters {
  __m256i c0, c1, c2, c3;
};

// c0 c1 of each lane, and c2 c3, as two doubles next to each other.
TITAN_AVX2 inline __m256d uniforms_of_words(__m256i high, __m256i low) {
  const __m256i bits = _mm256_or_si256(_mm256_srli_epi64(_mm256_slli_epi64(high, 32), 12),
                                       _mm256_srli_epi64(_mm256_slli_epi64(low, 32), 44));
  const __m256d exact =
      _mm256_sub_pd(_mm256_castsi256_pd(_mm256_or_si256(bits, _mm256_set1_epi64x(0x4330000000000000))),
                    _mm256_set1_pd(0x1p52));
  return _mm256_mul_pd(_mm256_add_pd(exact, _mm256_set1_pd(0.5)), _mm256_set1_pd(0x1p-52));
}
TITAN_AVX2 inline void store_uniforms(double* to, const FourCounters& c) {
  const __m256d first = uniforms_of_words(c.c0, c.c1), second = uniforms_of_words(c.c2, c.c3);
  const __m256d even = _mm256_unpacklo_pd(first, second), odd = _mm256_unpackhi_pd(first, second);
  _mm256_storeu_pd(to, _mm256_permute2f128_pd(even, odd, 0x20));
  _mm256_storeu_pd(to + 4, _mm256_permute2f128_pd(even, odd, 0x31));
}
TITAN_AVX2 inline void philox_round(FourCounters& c, __m256i key0, __m256i key1) {
  const __m256i product0 = _mm256_mul_epu32(c.c0, _mm256_set1_epi64x(kPhiloxMul0)),
                product1 = _mm256_mul_epu32(c.c2, _mm256_set1_epi64x(kPhiloxMul1));
  c.c0 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(product1, 32), c.c1), key0);
  c.c1 = product1;
  c.c2 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(product0, 32), c.c3), key1);
  c.c3 = product0;
}
TITAN_AVX2 void uniforms_by_avx2(double* to, uint64_t first_counter, const PhiloxKey& key,
                                 const PhiloxKey& name) {
  const __m256i name0 = _mm256_set1_epi64x(name[0]), name1 = _mm256_set1_epi64x(name[1]);
  __m256i keys0[kPhiloxRounds], keys1[kPhiloxRounds];
  uint32_t key0 = key[0], key1 = key[1];
  for (int round = 0; round < kPhiloxRounds; ++round, key0 += kPhiloxWeyl0, key1 += kPhiloxWeyl1) {
    keys0[round] = _mm256_set1_epi64x(key0);
    keys1[round] = _mm256_set1_epi64x(key1);
  }
  for (int64_t i = 0; i < kDrawCounters; i += 8) {  // two sets of four, to hide the latency of products
    const __m256i low = _mm256_add_epi64(_mm256_set1_epi64x(static_cast<int64_t>(first_counter) + i),
                                         _mm256_set_epi64x(3, 2, 1, 0));
    const __m256i high = _mm256_add_epi64(low, _mm256_set1_epi64x(4));
    FourCounters a{low, _mm256_srli_epi64(low, 32), name0, name1},
        b{high, _mm256_srli_epi64(high, 32), name0, name1};
    for (int round = 0; round < kPhiloxRounds; ++round) {
      philox_round(a, keys0[round], keys1[round]);
      philox_round(b, keys0[round], keys1[round]);
    }
    store_uniforms(to + 2 * i, a);
    store_uniforms(to + 2 * i + 8, b);
  }
}
#endif

TITAN_INLINE double uniform_of(uint32_t high, uint32_t low) {
  return (exact_double<double>((uint64_t{high} << 20) | (low >> 12)) + 0.5) * 0x1p-52;
}

// Philox for kDrawCounters counters at a time, on any processor.
void uniforms_by_loops(double* to, uint64_t first_counter, const PhiloxKey& key, const PhiloxKey& name) {
  uint32_t c0[kDrawCounters], c1[kDrawCounters], c2[kDrawCounters], c3[kDrawCounters];
  for (int64_t i = 0; i < kDrawCounters; ++i) {
    const uint64_t counter = first_counter + static_cast<uint64_t>(i);
    c0[i] = static_cast<uint32_t>(counter);
    c1[i] = static_cast<uint32_t>(counter >> 32);
    c2[i] = name[0];
    c3[i] = name[1];
  }
  uint32_t key0 = key[0], key1 = key[1];
  for (int round = 0; round < kPhiloxRounds; ++round, key0 += kPhiloxWeyl0, key1 += kPhiloxWeyl1) {
    for (int64_t i = 0; i < kDrawCounters; ++i) {
      const uint64_t product0 = uint64_t{kPhiloxMul0} * c0[i], product1 = uint64_t{kPhiloxMul1} * c2[i];
      c0[i] = static_cast<uint32_t>(product1 >> 32) ^ c1[i] ^ key0;
      c1[i] = static_cast<uint32_t>(product1);
      c2[i] = static_cast<uint32_t>(product0 >> 32) ^ c3[i] ^ key1;
      c3[i] = static_cast<uint32_t>(product0);
    }
  }
  for (int64_t i = 0; i < kDrawCounters; ++i) {
    to[2 * i] = uniform_of(c0[i], c1[i]);
    to[2 * i + 1] = uniform_of(c2[i], c3[i]);
  }
}

using UniformsOfLanes = void (*)(double* to, uint64_t first_counter, const PhiloxKey& key,
                                 const PhiloxKey& name);

UniformsOfLanes uniforms_of(DrawLanes lanes) {
#if defined(__x86_64__)
  if (lanes == DrawLanes::Avx512) return uniforms_by_avx512;
  if (lanes == DrawLanes::Avx2) return uniforms_by_avx2;
#endif
  return uniforms_by_loops;
}

// For each set of lanes (a bit per lane): a permutation that puts those lanes first, and their number.
struct Compaction {
  uint64_t order[16][4];
  int32_t lanes[16][4];
  int64_t count[16];
};
constexpr Compaction make_compaction() {
  Compaction result{};
  for (unsigned set = 0; set < 16; ++set) {
    unsigned n = 0;
    for (unsigned lane = 0; lane < 4; ++lane)
      if (set & (1u << lane)) {
        result.order[set][n] = lane;
        result.lanes[set][n++] = static_cast<int32_t>(lane);
      }
    result.count[set] = n;
  }
  return result;
}
constexpr Compaction kCompaction = make_compaction();

TITAN_INLINE Doubles reordered(Doubles v, const uint64_t (&order)[4]) {
#if defined(__clang__)
  return Doubles{v[order[0]], v[order[1]], v[order[2]], v[order[3]]};
#else
  Quads lanes;
  std::memcpy(&lanes, order, sizeof lanes);
  return __builtin_shuffle(v, lanes);
#endif
}

// Branchless, because half of all vectors have a lane outside, in an unpredictable order.
TITAN_INLINE int64_t put_aside(Outside& outside, int64_t count, int32_t first, Doubles p, Doubles q) {
  const auto inside = (q >= -as241::kCenter) & (q <= as241::kCenter);
  const auto bits = ~inside & decltype(inside){1, 2, 4, 8};
  const auto set = (bits[0] | bits[1]) | (bits[2] | bits[3]);
  Lanes32 where;
  std::memcpy(&where, kCompaction.lanes[set], sizeof where);
  ops::simd::store(outside.p + count, reordered(p, kCompaction.order[set]));
  where += first;
  std::memcpy(outside.where + count, &where, sizeof where);
  return count + kCompaction.count[set];
}

TITAN_INLINE void finish_outside(double* z, Outside& outside, int64_t count) {
  for (int64_t i = 0; i < count; i += 4) {
    const Doubles p = ops::simd::load(outside.p + i);
    ops::simd::store(outside.r + i, -fixed_log<Doubles>(p < 0.5 ? p : 1.0 - p));
  }
  const int64_t padded = (count + 3) / 4 * 4;
  for (int64_t i = 0; i < padded; ++i) outside.r[i] = __builtin_sqrt(outside.r[i]);
  for (int64_t i = 0; i < count; i += 4) {
    const Doubles p = ops::simd::load(outside.p + i), r = ops::simd::load(outside.r + i);
    const Doubles magnitude = as241::flank(r);
    ops::simd::store(outside.p + i, p < 0.5 ? -magnitude : magnitude);
  }
  for (int64_t i = 0; i < count; ++i) {
    double value = outside.p[i];
    if (__builtin_expect(outside.r[i] > as241::kFlank, 0))
      value = std::copysign(as241::tail(outside.r[i]), value);
    z[outside.where[i]] = value;
  }
}

TITAN_CPU_CLONES void normals_of_block(double* z, int64_t count, const NormalDraw& draw, Outside& outside) {
  int64_t aside = 0;
  for (int64_t i = 0; i < count; i += 4) {
    const Doubles p = draw.offset + draw.scale * ops::simd::load_up_to(z + i, count - i, 0.5);
    const Doubles q = p - 0.5;
    aside = put_aside(outside, aside, static_cast<int32_t>(i), p, q);
    ops::simd::store_up_to(z + i, as241::center(q), count - i);
  }
  while (aside > 0 && outside.where[aside - 1] >= count) --aside;  // lanes past the last element
  for (int lane = 0; lane < 4; ++lane) outside.p[aside + lane] = 0.25;
  finish_outside(z, outside, aside);
  for (int64_t i = 0; i < count; ++i) {
    const double value = draw.mean + draw.std * z[i];
    z[i] = value < draw.low ? draw.low : draw.high < value ? draw.high : value;
  }
}

}  // namespace

DrawLanes best_draw_lanes() {
  const ops::CpuFeatures& cpu = ops::cpu_features();
  return cpu.avx512 ? DrawLanes::Avx512 : cpu.avx2 ? DrawLanes::Avx2 : DrawLanes::Portable;
}

RandomStream::RandomStream(uint64_t seed, uint64_t name_hash)
    : key_{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)},
      name_{static_cast<uint32_t>(name_hash), static_cast<uint32_t>(name_hash >> 32)} {}

void RandomStream::uniforms(double* to, int64_t count, uint64_t first_index, DrawLanes lanes) const {
  const UniformsOfLanes uniforms_of_lanes = uniforms_of(lanes);
  double edge[kLaneElements];  // for a block of lanes of which only a part is needed
  while (count > 0) {
    const int64_t skipped = static_cast<int64_t>(first_index % 2);
    const int64_t taken = std::min(count, kLaneElements - skipped);
    const bool whole = taken == kLaneElements;
    uniforms_of_lanes(whole ? to : edge, first_index / 2, key_, name_);
    if (!whole) std::copy_n(edge + skipped, taken, to);
    to += taken;
    count -= taken;
    first_index += static_cast<uint64_t>(taken);
  }
}

void draw_normals(double* values, int64_t count, const NormalDraw& draw, DrawLanes lanes) {
  Outside outside;
  auto normals = normals_of_block;
#if defined(__x86_64__)
  if (lanes == DrawLanes::Avx512) normals = normals_by_avx512;
#endif
  constexpr int64_t kBlock = Outside::kCapacity - Outside::kWidest;
  for (int64_t i = 0; i < count; i += kBlock) normals(values + i, std::min(kBlock, count - i), draw, outside);
}

TITAN_CPU_CLONES void round_to_floats(float* to, const double* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i]);
}

}  // namespace titan::nn

#include "nn/random_block.h"

#if defined(__x86_64__)

// GCC 12 warns about its own intrinsics (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <cmath>

#define TITAN_AVX512 __attribute__((target("avx512f,avx512dq,avx512vl,avx2,popcnt")))

namespace titan::nn {

using EightDoubles = double __attribute__((vector_size(64)));
using EightWords = uint64_t __attribute__((vector_size(64)));
template <>
struct BitsOf<EightDoubles> {
  using type = EightWords;
};

namespace {

// Eight counters in the low halves of 64-bit lanes; the high halves are ignored.
struct EightCounters {
  __m512i c0, c1, c2, c3;
};

TITAN_AVX512 inline __m512i xor_of(__m512i a, __m512i b, __m512i c) {
  return _mm512_ternarylogic_epi64(a, b, c, 0x96);
}

// c0 c1 of each lane, and c2 c3, as two doubles next to each other.
TITAN_AVX512 inline __m512d uniforms_of_words(__m512i high, __m512i low) {
  const __m512i bits = _mm512_or_si512(_mm512_srli_epi64(_mm512_slli_epi64(high, 32), 12),
                                       _mm512_srli_epi64(_mm512_slli_epi64(low, 32), 44));
  const __m512d exact =
      _mm512_sub_pd(_mm512_castsi512_pd(_mm512_or_si512(bits, _mm512_set1_epi64(0x4330000000000000))),
                    _mm512_set1_pd(0x1p52));
  return _mm512_mul_pd(_mm512_add_pd(exact, _mm512_set1_pd(0.5)), _mm512_set1_pd(0x1p-52));
}

TITAN_AVX512 inline void store_uniforms(double* to, const EightCounters& c) {
  const __m512d first = uniforms_of_words(c.c0, c.c1), second = uniforms_of_words(c.c2, c.c3);
  const __m512i low = _mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0),
                high = _mm512_set_epi64(15, 7, 14, 6, 13, 5, 12, 4);
  _mm512_storeu_pd(to, _mm512_permutex2var_pd(first, low, second));
  _mm512_storeu_pd(to + 8, _mm512_permutex2var_pd(first, high, second));
}

TITAN_AVX512 inline void philox_round(EightCounters& c, __m512i key0, __m512i key1) {
  const __m512i product0 = _mm512_mul_epu32(c.c0, _mm512_set1_epi64(kPhiloxMul0)),
                product1 = _mm512_mul_epu32(c.c2, _mm512_set1_epi64(kPhiloxMul1));
  c.c0 = xor_of(_mm512_srli_epi64(product1, 32), c.c1, key0);
  c.c1 = product1;
  c.c2 = xor_of(_mm512_srli_epi64(product0, 32), c.c3, key1);
  c.c3 = product0;
}

// Entries count to count + 7 may be read.
TITAN_AVX512 inline void finish_outside(double* z, Outside& outside, int64_t count) {
  for (int64_t i = 0; i < count; i += 8) {
    const auto p = static_cast<EightDoubles>(_mm512_loadu_pd(outside.p + i));
    const EightDoubles r = static_cast<EightDoubles>(
        _mm512_sqrt_pd(static_cast<__m512d>(-fixed_log<EightDoubles>(p < 0.5 ? p : 1.0 - p))));
    _mm512_storeu_pd(outside.r + i, static_cast<__m512d>(r));
    const EightDoubles magnitude = as241::flank(r);
    _mm512_storeu_pd(outside.p + i, static_cast<__m512d>(p < 0.5 ? -magnitude : magnitude));
  }
  for (int64_t i = 0; i < count; ++i) {
    double value = outside.p[i];
    if (__builtin_expect(outside.r[i] > as241::kFlank, 0))
      value = std::copysign(as241::tail(outside.r[i]), value);
    z[outside.where[i]] = value;
  }
}

TITAN_AVX512 inline __mmask8 lanes_up_to(int64_t count) {
  return static_cast<__mmask8>(count >= 8 ? 0xff : (1 << count) - 1);
}

}  // namespace

TITAN_AVX512 void uniforms_by_avx512(double* to, uint64_t first_counter, const PhiloxKey& key,
                                     const PhiloxKey& name) {
  const __m512i name0 = _mm512_set1_epi64(name[0]), name1 = _mm512_set1_epi64(name[1]);
  __m512i keys0[kPhiloxRounds], keys1[kPhiloxRounds];
  uint32_t key0 = key[0], key1 = key[1];
  for (int round = 0; round < kPhiloxRounds; ++round, key0 += kPhiloxWeyl0, key1 += kPhiloxWeyl1) {
    keys0[round] = _mm512_set1_epi64(key0);
    keys1[round] = _mm512_set1_epi64(key1);
  }
  for (int64_t i = 0; i < kDrawCounters; i += 16) {  // two sets of eight, to hide the latency of products
    const __m512i low = _mm512_add_epi64(_mm512_set1_epi64(static_cast<int64_t>(first_counter) + i),
                                         _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0));
    const __m512i high = _mm512_add_epi64(low, _mm512_set1_epi64(8));
    EightCounters a{low, _mm512_srli_epi64(low, 32), name0, name1},
        b{high, _mm512_srli_epi64(high, 32), name0, name1};
    for (int round = 0; round < kPhiloxRounds; ++round) {
      philox_round(a, keys0[round], keys1[round]);
      philox_round(b, keys0[round], keys1[round]);
    }
    store_uniforms(to + 2 * i, a);
    store_uniforms(to + 2 * i + 16, b);
  }
}

TITAN_AVX512 void normals_by_avx512(double* z, int64_t count, const NormalDraw& draw, Outside& outside) {
  const __m512d center = _mm512_set1_pd(as241::kCenter), minus_center = _mm512_set1_pd(-as241::kCenter);
  __m256i where = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
  int64_t aside = 0;
  for (int64_t i = 0; i < count; i += 8, where = _mm256_add_epi32(where, _mm256_set1_epi32(8))) {
    const __mmask8 lanes = lanes_up_to(count - i);
    const auto u = static_cast<EightDoubles>(_mm512_mask_loadu_pd(_mm512_set1_pd(0.5), lanes, z + i));
    const EightDoubles p = draw.offset + draw.scale * u;
    const EightDoubles q = p - 0.5;
    const auto q_of = static_cast<__m512d>(q);
    const auto out = static_cast<__mmask8>(
        (_mm512_cmp_pd_mask(q_of, minus_center, _CMP_LT_OQ) | _mm512_cmp_pd_mask(q_of, center, _CMP_GT_OQ)) &
        lanes);
    _mm512_storeu_pd(outside.p + aside, _mm512_maskz_compress_pd(out, static_cast<__m512d>(p)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(outside.where + aside),
                        _mm256_maskz_compress_epi32(out, where));
    aside += __builtin_popcount(out);
    _mm512_mask_storeu_pd(z + i, lanes, static_cast<__m512d>(as241::center(q)));
  }
  _mm512_storeu_pd(outside.p + aside, _mm512_set1_pd(0.25));  // completes the last vector
  finish_outside(z, outside, aside);
  for (int64_t i = 0; i < count; i += 8) {
    const __mmask8 lanes = lanes_up_to(count - i);
    const EightDoubles value =
        draw.mean + draw.std * static_cast<EightDoubles>(_mm512_maskz_loadu_pd(lanes, z + i));
    const EightDoubles low = EightDoubles{} + draw.low, high = EightDoubles{} + draw.high;
    _mm512_mask_storeu_pd(z + i, lanes,
                          static_cast<__m512d>(value < low    ? low
                                               : high < value ? high
                                                              : value));
  }
}

}  // namespace titan::nn

#endif

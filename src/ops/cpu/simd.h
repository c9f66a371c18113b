#pragma once

// Vectors for CPU kernels, as GCC's and Clang's vector types, and functions compiled for several instruction
// sets at once.
//
// [Note: clones] A function marked TITAN_CPU_CLONES is compiled for plain x86-64, AVX2 and AVX-512, and the
// loader picks one version. All functions and lambdas that it calls must be TITAN_INLINE, or their plain
// version would run. So a kernel is a marked function on raw pointers and a range, called by
// at::parallel_for. On other processors and with sanitizers (whose runtime isn't ready when the loader picks)
// the mark is empty.
//
// [Note: wide vectors] A kernel that gains from AVX-512's 64-byte vectors is a TITAN_INLINE template over its
// vector, with two functions around it: a TITAN_CPU_CLONES one for Floats and a TITAN_WIDE one for
// WideFloats, to be called if have_wide_vectors().

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include <c10/util/BFloat16.h>

#include "ops/cpu_features.h"

#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__clang__)
#define TITAN_CPU_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define TITAN_WIDE __attribute__((target("arch=x86-64-v4")))
#else
#define TITAN_CPU_CLONES
#define TITAN_WIDE
#define TITAN_NO_WIDE
#endif
#define TITAN_INLINE __attribute__((always_inline)) inline

namespace titan::ops::simd {

using Floats = float __attribute__((vector_size(32)));
using Doubles = double __attribute__((vector_size(32)));
using Ints = int32_t __attribute__((vector_size(32)));
using Words = uint32_t __attribute__((vector_size(32)));
using Halves = uint16_t __attribute__((vector_size(16)));
using WideFloats = float __attribute__((vector_size(64)));

/// Whether functions marked TITAN_WIDE may be called.
inline bool have_wide_vectors() {
#ifdef TITAN_NO_WIDE
  return false;
#else
  return cpu_features().avx512;
#endif
}

/// The vector type and the scalar type for computing with elements of type T.
template <class T>
struct Lanes {
  using Vector = Floats;
  using Scalar = float;
};
template <>
struct Lanes<double> {
  using Vector = Doubles;
  using Scalar = double;
};
template <class T>
using Vector = typename Lanes<T>::Vector;
template <class T>
using Scalar = typename Lanes<T>::Scalar;
template <class T>
inline constexpr int64_t kWidth = sizeof(Vector<T>) / sizeof(Scalar<T>);
/// Floats in a vector V.
template <class V>
inline constexpr int64_t kFloatsOf = sizeof(V) / sizeof(float);
/// The result of comparing two V: integers of the lanes' size, 0 or -1.
template <class V>
using IntsOf = decltype(V{} < V{});

template <class V>
TITAN_INLINE V load_vector(const float* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
TITAN_INLINE Floats load(const float* from) { return load_vector<Floats>(from); }
TITAN_INLINE Doubles load(const double* from) {
  Doubles v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
TITAN_INLINE Floats load(const c10::BFloat16* from) {
  Halves h;
  std::memcpy(&h, from, sizeof h);
  return reinterpret_cast<Floats>(__builtin_convertvector(h, Words) << 16);
}

TITAN_INLINE void store(float* to, Floats v) { std::memcpy(to, &v, sizeof v); }
TITAN_INLINE void store(float* to, WideFloats v) { std::memcpy(to, &v, sizeof v); }
TITAN_INLINE void store(double* to, Doubles v) { std::memcpy(to, &v, sizeof v); }
/// Rounds to nearest, ties to even; NaN stays NaN.
TITAN_INLINE void store(c10::BFloat16* to, Floats v) {
  const Words bits = reinterpret_cast<Words>(v);
  const Ints rounded = reinterpret_cast<Ints>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  const Ints is_nan = v != v;
  const Halves h = __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), Halves);
  std::memcpy(to, &h, sizeof h);
}

/// Loads kWidth<T> elements, or the remaining `count` with `rest` in the other lanes.
template <class T>
TITAN_INLINE Vector<T> load_up_to(const T* from, int64_t count, T rest = T(0)) {
  if (count >= kWidth<T>) return load(from);
  T buffer[kWidth<T>];
  for (int64_t i = 0; i < kWidth<T>; ++i) buffer[i] = i < count ? from[i] : rest;
  return load(buffer);
}
template <class T>
TITAN_INLINE void store_up_to(T* to, Vector<T> v, int64_t count) {
  if (count >= kWidth<T>) return store(to, v);
  T buffer[kWidth<T>];
  store(buffer, v);
  for (int64_t i = 0; i < count; ++i) to[i] = buffer[i];
}

/// The lower and the upper half of the lanes.
struct Halved {
  Floats low, high;
};
TITAN_INLINE Halved halve(WideFloats v) {
  Halved halves;
  std::memcpy(&halves, &v, sizeof v);
  return halves;
}

template <class V>
TITAN_INLINE V broadcast(decltype(V{}[0] + 0) value) {
  V v;
  for (size_t i = 0; i < sizeof(V) / sizeof(value); ++i) v[i] = value;
  return v;
}
template <class V>
TITAN_INLINE auto sum(V v) {
  auto total = v[0];
  for (size_t i = 1; i < sizeof(V) / sizeof(v[0]); ++i) total += v[i];
  return total;
}
template <class V>
TITAN_INLINE auto largest(V v) {
  auto best = v[0];
  for (size_t i = 1; i < sizeof(V) / sizeof(v[0]); ++i) best = v[i] > best ? v[i] : best;
  return best;
}
TITAN_INLINE float sum(WideFloats v) {
  const Halved halves = halve(v);
  return sum(halves.low + halves.high);
}
TITAN_INLINE float largest(WideFloats v) {
  const Halved halves = halve(v);
  return largest(halves.high > halves.low ? halves.high : halves.low);
}

/// e^x to 2 ulp (Cephes' expf): 2^n e^r with |r| <= ln(2)/2. Clamped to e^-87 below -87 and to e^88 above 88;
/// NaN stays NaN. V: Floats or WideFloats.
template <class V>
TITAN_INLINE V exp(V x) {
  constexpr float kLog2E = 1.44269504088896341f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  constexpr float kRoundToInt = 12582912.0f;  // 1.5 * 2^23: a number added to it loses its fraction
  x = x < -87.0f ? broadcast<V>(-87.0f) : x;
  x = x > 88.0f ? broadcast<V>(88.0f) : x;
  const V shifted = x * kLog2E + kRoundToInt;
  const V n = shifted - kRoundToInt;
  const V r = x - n * kLn2High - n * kLn2Low;
  V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const IntsOf<V> exponent = reinterpret_cast<IntsOf<V>>(shifted) - std::bit_cast<int32_t>(kRoundToInt) + 127;
  return p * reinterpret_cast<V>(exponent << 23);
}
/// float64 is for tests of exactness, so its speed doesn't matter.
TITAN_INLINE Doubles exp(Doubles x) {
  for (int i = 0; i < 4; ++i) x[i] = std::exp(x[i]);
  return x;
}

template <class V>
TITAN_INLINE V sigmoid(V x) {
  return 1 / (1 + exp(-x));
}

}  // namespace titan::ops::simd

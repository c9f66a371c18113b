#pragma once

// Vectors for CPU kernels, as GCC's and Clang's vector types, and functions compiled for several instruction
// sets at once.
//
// [Note: clones] A function marked TITAN_CPU_CLONES is compiled for plain x86-64, AVX2 and AVX-512, and the
// loader picks one. All it calls has to be TITAN_INLINE (lambdas too), or it would run the plain version. So
// a kernel is a marked function on raw pointers and a range, and at::parallel_for calls it from outside. On
// other processors and under sanitizers (whose run time isn't up when the loader asks) the mark is empty.

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include <c10/util/BFloat16.h>

#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__clang__)
#define TITAN_CPU_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TITAN_CPU_CLONES
#endif
#define TITAN_INLINE __attribute__((always_inline)) inline

namespace titan::ops::simd {

using Floats = float __attribute__((vector_size(32)));
using Doubles = double __attribute__((vector_size(32)));
using Ints = int32_t __attribute__((vector_size(32)));
using Words = uint32_t __attribute__((vector_size(32)));
using Halves = uint16_t __attribute__((vector_size(16)));

/// How elements of type T are computed with: the vector and the scalar type.
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

TITAN_INLINE Floats load(const float* from) {
  Floats v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
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
TITAN_INLINE void store(double* to, Doubles v) { std::memcpy(to, &v, sizeof v); }
/// Rounds to nearest, ties to even; NaN stays NaN.
TITAN_INLINE void store(c10::BFloat16* to, Floats v) {
  const Words bits = reinterpret_cast<Words>(v);
  const Ints rounded = reinterpret_cast<Ints>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  const Ints is_nan = v != v;
  const Halves h = __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), Halves);
  std::memcpy(to, &h, sizeof h);
}

/// kWidth<T> elements, or the `count` that are left, with `rest` in the other lanes.
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

/// e^x to 2 ulp (Cephes' expf): 2^n e^r with |r| <= ln(2)/2. Below -87 it stays at e^-87, above 88 at e^88;
/// NaN stays NaN.
TITAN_INLINE Floats exp(Floats x) {
  constexpr float kLog2E = 1.44269504088896341f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  constexpr float kRoundToInt = 12582912.0f;  // 1.5 * 2^23: what is added to it loses its fraction
  x = x < -87.0f ? broadcast<Floats>(-87.0f) : x;
  x = x > 88.0f ? broadcast<Floats>(88.0f) : x;
  const Floats shifted = x * kLog2E + kRoundToInt;
  const Floats n = shifted - kRoundToInt;
  const Floats r = x - n * kLn2High - n * kLn2Low;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Ints exponent = reinterpret_cast<Ints>(shifted) - std::bit_cast<int32_t>(kRoundToInt) + 127;
  return p * reinterpret_cast<Floats>(exponent << 23);
}
/// float64 is for tests of exactness, not for speed.
TITAN_INLINE Doubles exp(Doubles x) {
  for (int i = 0; i < 4; ++i) x[i] = std::exp(x[i]);
  return x;
}

template <class V>
TITAN_INLINE V sigmoid(V x) {
  return 1 / (1 + exp(-x));
}

}  // namespace titan::ops::simd

#pragma once

// Random numbers in blocks, several at a time in vector registers: the interface that fill() uses, then the
// formulas that the kernels of random_block.cpp and random_avx512.cpp share. Sources that include this are
// compiled with -ffp-contract=off.

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "ops/cpu/simd.h"
#include "ops/philox.h"

namespace titan::nn {

/// Instruction sets; all compute the same bits.
enum class DrawLanes { Portable, Avx2, Avx512 };
/// The widest one of this processor.
DrawLanes best_draw_lanes();

/// [Note: the stream]
/// Elements 2i and 2i+1 (row-major index in the whole tensor) of the parameter with name hash h under `seed`
/// share one Philox4x32-10 block with key = seed and counter = (i, h): words 0 and 1 for the first, 2 and 3
/// for the second. The first 52 bits k of these give u = (k + 1/2) / 2^52, strictly between 0 and 1, exact in
/// a double and symmetric around 1/2.
class RandomStream {
 public:
  RandomStream(uint64_t seed, uint64_t name_hash);
  /// Writes the uniforms of elements first_index, first_index + 1, ...
  void uniforms(double* to, int64_t count, uint64_t first_index, DrawLanes lanes = best_draw_lanes()) const;

 private:
  std::array<uint32_t, 2> key_, name_;
};

/// Makes a normal number from a uniform one: mean + std * inverse_normal(offset + scale * u), clamped to
/// [low, high].
struct NormalDraw {
  double offset = 0, scale = 1;  // map u to a probability
  double mean = 0, std = 1;
  double low = -std::numeric_limits<double>::infinity(), high = std::numeric_limits<double>::infinity();
};

/// Maps uniforms to normals in place, with the bits of inverse_normal().
void draw_normals(double* values, int64_t count, const NormalDraw& draw, DrawLanes lanes = best_draw_lanes());

/// Rounds to nearest.
void round_to_floats(float* to, const double* from, int64_t count);

// The inverse of the normal distribution function, with the same bits on every machine. It uses only +, -, *,
// / and sqrt of IEEE doubles in a fixed order, and not libm, whose logarithms differ between versions. V is a
// double or a vector of doubles, with the same operations in the same order.

using ops::simd::Doubles;
using Quads = uint64_t __attribute__((vector_size(32)));

template <class V>
struct BitsOf;
template <>
struct BitsOf<double> {
  using type = uint64_t;
};
template <>
struct BitsOf<Doubles> {
  using type = Quads;
};

/// An integer below 2^52 as a double, exactly and without a conversion instruction (AVX2 has none).
template <class V>
TITAN_INLINE V exact_double(typename BitsOf<V>::type integer) {
  return __builtin_bit_cast(V, integer | 0x4330000000000000ull) - 0x1p52;
}

/// The natural logarithm of a positive normal number, by fdlibm's e_log.c (Sun Microsystems, 1993): error
/// below 1 ulp.
template <class V>
TITAN_INLINE V fixed_log(V x) {
  using Bits = typename BitsOf<V>::type;
  constexpr double kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770002e-10;
  constexpr double kL1 = 6.666666666666735130e-01, kL2 = 3.999999999940941908e-01,
                   kL3 = 2.857142874366239149e-01, kL4 = 2.222219843214978396e-01,
                   kL5 = 1.818357216161805012e-01, kL6 = 1.531383769920937332e-01,
                   kL7 = 1.479819860511658591e-01;
  // x = 2^k (1 + f), with 1 + f in [sqrt(2)/2, sqrt(2)).
  const Bits bits = __builtin_bit_cast(Bits, x) + (0x3ff0000000000000ull - 0x3fe6a09e667f3bcdull);
  const V k = exact_double<V>(bits >> 52) - 1023.0;
  const Bits mantissa = (bits & 0x000fffffffffffffull) + 0x3fe6a09e667f3bcdull;
  const V f = __builtin_bit_cast(V, mantissa) - 1.0;
  const V half_square = 0.5 * f * f;
  const V s = f / (2.0 + f);
  const V z = s * s;
  const V w = z * z;
  const V even = w * (kL2 + w * (kL4 + w * kL6));
  const V odd = z * (kL1 + w * (kL3 + w * (kL5 + w * kL7)));
  return s * (half_square + (odd + even)) + k * kLn2Low - half_square + f + k * kLn2High;
}

/// Coefficients in ascending order; Horner's rule.
template <int N, class V>
TITAN_INLINE V horner(const double (&coefficients)[N], V x) {
  V value = x * coefficients[N - 1] + coefficients[N - 2];
#pragma GCC unroll 8
  for (int i = N - 3; i >= 0; --i) value = value * x + coefficients[i];
  return value;
}

/// Wichura, algorithm AS 241 (PPND16), Applied Statistics 37 (1988): rational functions for three ranges.
namespace as241 {

inline constexpr double kCenterTop[] = {
    3.3871328727963666080e0,  1.3314166789178437745e+2, 1.9715909503065514427e+3, 1.3731693765509461125e+4,
    4.5921953931549871457e+4, 6.7265770927008700853e+4, 3.3430575583588128105e+4, 2.5090809287301226727e+3};
inline constexpr double kCenterBottom[] = {
    1.0000000000000000000e+0, 4.2313330701600911252e+1, 6.8718700749205790830e+2, 5.3941960214247511077e+3,
    2.1213794301586595867e+4, 3.9307895800092710610e+4, 2.8729085735721942674e+4, 5.2264952788528545610e+3};
inline constexpr double kFlankTop[] = {1.42343711074968357734e0,  4.63033784615654529590e0,
                                       5.76949722146069140550e0,  3.64784832476320460504e0,
                                       1.27045825245236838258e0,  2.41780725177450611770e-1,
                                       2.27238449892691845833e-2, 7.74545014278341407640e-4};
inline constexpr double kFlankBottom[] = {1.0000000000000000000e+0,  2.05319162663775882187e0,
                                          1.67638483018380384940e0,  6.89767334985100004550e-1,
                                          1.48103976427480074590e-1, 1.51986665636164571966e-2,
                                          5.47593808499534494600e-4, 1.05075007164441684324e-9};
inline constexpr double kTailTop[] = {6.65790464350110377720e0,  5.46378491116411436990e0,
                                      1.78482653991729133580e0,  2.96560571828504891230e-1,
                                      2.65321895265761230930e-2, 1.24266094738807843860e-3,
                                      2.71155556874348757815e-5, 2.01033439929228813265e-7};
inline constexpr double kTailBottom[] = {1.0000000000000000000e+0,  5.99832206555887937690e-1,
                                         1.36929880922735805310e-1, 1.48753612908506148525e-2,
                                         7.86869131145613259100e-4, 1.84631831751005468180e-5,
                                         1.42151175831644588870e-7, 2.04426310338993978564e-15};
inline constexpr double kCenter = 0.425;  ///< largest |p - 1/2| for the center's function
inline constexpr double kFlank = 5.0;     ///< largest r for the flank's function

/// z for q = p - 1/2 within the center.
template <class V>
TITAN_INLINE V center(V q) {
  const V r = 0.180625 - q * q;
  return q * horner(kCenterTop, r) / horner(kCenterBottom, r);
}
/// |z| for r = sqrt(-log(min(p, 1 - p))).
template <class V>
TITAN_INLINE V flank(V r) {
  return horner(kFlankTop, r - 1.6) / horner(kFlankBottom, r - 1.6);
}
inline double tail(double r) { return horner(kTailTop, r - 5.0) / horner(kTailBottom, r - 5.0); }

}  // namespace as241

/// z with Phi(z) = p, for 0 < p < 1, with a relative error of about 1e-16.
inline double inverse_normal(double p) {
  const double q = p - 0.5;
  if (q >= -as241::kCenter && q <= as241::kCenter) return as241::center(q);
  const double r = std::sqrt(-fixed_log(q < 0 ? p : 1.0 - p));
  const double z = r <= as241::kFlank ? as241::flank(r) : as241::tail(r);
  return q < 0 ? -z : z;
}

/// Phi(z), found by bisection as the smallest p with inverse_normal(p) >= z, so that both agree to the last
/// bit and no error function is needed. Slow (64 evaluations): for bounds, not for elements.
inline double normal_distribution(double z) {
  if (z > 0) return 1.0 - normal_distribution(-z);
  constexpr double kSmallest = 0x1p-1022;
  if (z < inverse_normal(kSmallest)) return 0.0;
  uint64_t low = std::bit_cast<uint64_t>(kSmallest),
           high = std::bit_cast<uint64_t>(0.5);  // doubles have the same order as their bits
  while (low < high) {
    const uint64_t middle = low + (high - low) / 2;
    if (inverse_normal(std::bit_cast<double>(middle)) < z) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return std::bit_cast<double>(low);
}

using PhiloxKey = std::array<uint32_t, 2>;

/// The number of Philox counters in one call, each for two elements.
inline constexpr int64_t kDrawCounters = 64;

/// The few elements outside the center, which the first pass collects.
struct Outside {
  static constexpr int64_t kCapacity = 256, kWidest = 8;
  double p[kCapacity + kWidest];  // probabilities, then values, with space for a partial vector
  double r[kCapacity + kWidest];  // the formulas' arguments
  int32_t where[kCapacity + kWidest];
};

#if defined(__x86_64__)
/// For processors with AVX-512 (F, DQ and VL): the uniforms of kDrawCounters counters, and a block of at most
/// Outside::kCapacity - Outside::kWidest normals, in place.
void uniforms_by_avx512(double* to, uint64_t first_counter, const PhiloxKey& key, const PhiloxKey& name);
void normals_by_avx512(double* z, int64_t count, const NormalDraw& draw, Outside& outside);
#endif

}  // namespace titan::nn

#pragma once

// From a block's largest magnitude to its exponent and its factor, one at a time: for the
// CPU kernel, and constants for the composition.

#include <bit>
#include <cstdint>

#include <c10/core/ScalarType.h>

#include "float8/cast.h"
#include "ops/cpu/simd.h"

namespace titan::float8 {

inline constexpr int kNotFinite = 255;  ///< the exponent of a block that isn't

/// Of the last power of two within the format's range: 256, 32768.
constexpr int largest_exponent(at::ScalarType dtype) { return dtype == at::kFloat8_e4m3fn ? 8 : 15; }

/// `magnitude`: fp32's bits without the sign.
TITAN_INLINE int exponent_of(uint32_t magnitude, at::ScalarType dtype, bool round_up) {
  if (magnitude >= 0x7f800000u) return kNotFinite;
  if (!round_up) {
    const int exponent = static_cast<int>(magnitude >> 23) - largest_exponent(dtype);
    return exponent < 0 ? 0 : exponent;
  }
  const float end = dtype == at::kFloat8_e4m3fn ? 448.0F : 57344.0F;
  const auto bits = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) / end);
  const uint32_t exponent = bits >> 23, mantissa = bits & 0x7fffff;
  return static_cast<int>(exponent == 0 ? mantissa > 0x400000 : exponent + (mantissa > 0));
}

/// [Note: factors of blocks] What a block is multiplied by: 2^(127 - exponent). Of exponent 0 torchao's: one
/// bit less than that, or none at all where exponents are rounded up. Of what isn't finite 0: its values are
/// NaN by their scale, whatever the data.
TITAN_INLINE float factor_of(int exponent, bool round_up) {
  if (exponent == kNotFinite) return 0.0F;
  if (exponent == 0 && round_up) return 1.0F;
  return std::bit_cast<float>(static_cast<uint32_t>(254 - (exponent < 1 ? 1 : exponent)) << 23);
}

}  // namespace titan::float8

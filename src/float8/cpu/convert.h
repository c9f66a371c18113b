#pragma once

// From fp32 to 8 bits, eight at a time, as c10 converts one.

#include <cstring>

#include "ops/cpu/simd.h"

namespace titan::float8::cpu {

namespace simd = ops::simd;
using simd::Floats;
using simd::Ints;
using simd::Words;
using Bytes8 = uint8_t __attribute__((vector_size(8)));

/// The bits of a format; a number below `smallest_normal` keeps its last bits by an addition that shifts them
/// out of fp32.
struct E4m3 {
  static constexpr uint32_t largest = 0x43e00000;          // 448
  static constexpr uint32_t smallest_normal = 121u << 23;  // 2^-6
  static constexpr uint32_t shift_down = 141u << 23;
  static constexpr int mantissa_shift = 20;
  static constexpr uint32_t rebias = (static_cast<uint32_t>(7 - 127) << 23) + 0x7ffff;
};
struct E5m2 {
  static constexpr uint32_t largest = 0x47600000;          // 57344
  static constexpr uint32_t smallest_normal = 113u << 23;  // 2^-14
  static constexpr uint32_t shift_down = 134u << 23;
  static constexpr int mantissa_shift = 21;
  static constexpr uint32_t rebias = (static_cast<uint32_t>(15 - 127) << 23) + 0xfffff;
};

TITAN_INLINE Words select(Ints mask, Words yes, Words no) {
  const Words bits = reinterpret_cast<Words>(mask);
  return (bits & yes) | (~bits & no);
}

/// Nearest, ties to even, held within the format's range; NaN stays NaN and keeps its sign. One byte per
/// lane.
template <class Format>
TITAN_INLINE Words to_float8(Floats x) {
  const Words bits = reinterpret_cast<Words>(x), sign = bits & 0x80000000u;
  const Words magnitude = bits ^ sign;
  // As signed numbers, which AVX2 compares: magnitudes have no sign bit.
  const Ints is_nan = reinterpret_cast<Ints>(magnitude) > 0x7f800000;
  const Ints above = reinterpret_cast<Ints>(magnitude) > static_cast<int32_t>(Format::largest);
  const Words held = select(above, Words{} + Format::largest, magnitude);
  const Ints is_small = reinterpret_cast<Ints>(held) < static_cast<int32_t>(Format::smallest_normal);
  const Words shift = Words{} + Format::shift_down;
  const Words small =
      reinterpret_cast<Words>(reinterpret_cast<Floats>(held) + reinterpret_cast<Floats>(shift)) - shift;
  const Words normal =
      (held + Format::rebias + ((held >> Format::mantissa_shift) & 1)) >> Format::mantissa_shift;
  const Words value = select(is_small, small, normal);
  return select(is_nan, Words{} + 0x7f, value) | (sign >> 24);
}

TITAN_INLINE void store_bytes(uint8_t* to, Words lanes) {
  const Bytes8 bytes = __builtin_convertvector(lanes, Bytes8);
  std::memcpy(to, &bytes, sizeof bytes);
}

}  // namespace titan::float8::cpu

#pragma once

// Casting and turning at once: tiles of 64 by 64 elements are cast row by row, turned eight bytes by eight,
// and written in whole lines of the cache: the result's rows often lie a power of two apart, so that few of
// them fit into it at once.

#include <cstdint>
#include <cstring>

#include "float8/cpu/convert.h"

namespace titan::float8::cpu {

inline constexpr int64_t kTile = 64;
inline constexpr int64_t kFloatLanes = simd::kWidth<float>;
using Blocks = uint64_t __attribute__((vector_size(32)));  // eight bytes of a row each

// In: row i of the four 8 x 8 blocks; out: column i of each (Warren, "Hacker's Delight", 7-3).
template <int kDistance, uint64_t kMask>
TITAN_INLINE void swap_halves(Blocks (&rows)[8]) {
  for (int i = 0; i < 8; ++i) {
    if (i & kDistance) continue;
    const Blocks changed = ((rows[i] >> (8 * kDistance)) ^ rows[i + kDistance]) & (Blocks{} + kMask);
    rows[i + kDistance] ^= changed;
    rows[i] ^= changed << (8 * kDistance);
  }
}
TITAN_INLINE void turn_blocks(Blocks (&rows)[8]) {
  swap_halves<4, 0x00000000ffffffff>(rows);
  swap_halves<2, 0x0000ffff0000ffff>(rows);
  swap_halves<1, 0x00ff00ff00ff00ff>(rows);
}

template <class Format, class T>
TITAN_INLINE void cast_tile_row(uint8_t* out, const T* x, const float* scales, int64_t scale_step,
                                int64_t count) {
  for (int64_t i = 0; i < kTile; i += kFloatLanes) {
    const simd::Floats scale =
        scale_step == 0 ? simd::broadcast<simd::Floats>(scales[0]) : simd::load_up_to(scales + i, count - i);
    const simd::Floats values = i < count ? simd::load_up_to(x + i, count - i) : simd::Floats{};
    store_bytes(out + i, to_float8<Format>(values * scale));
  }
}

TITAN_INLINE void turn_tile(uint8_t* turned, const uint8_t* tile) {
  for (int64_t top = 0; top < kTile; top += 8)
    for (int64_t left = 0; left < kTile; left += 32) {
      Blocks rows[8];
      for (int64_t i = 0; i < 8; ++i) std::memcpy(&rows[i], tile + (top + i) * kTile + left, sizeof(Blocks));
      turn_blocks(rows);
      for (int64_t block = 0; block < 4; ++block)
        for (int64_t i = 0; i < 8; ++i) {
          const uint64_t bytes = rows[i][block];
          std::memcpy(turned + (left + 8 * block + i) * kTile + top, &bytes, 8);
        }
    }
}

}  // namespace titan::float8::cpu

#pragma once

// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) is a
// function from (key, counter) to 128 random bits, so the n-th number doesn't depend on the n-1 before it.

#include <cstdint>

namespace titan {

inline constexpr int kPhiloxRounds = 10;
inline constexpr uint32_t kPhiloxMul0 = 0xD2511F53, kPhiloxMul1 = 0xCD9E8D57;
inline constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9, kPhiloxWeyl1 = 0xBB67AE85;

}  // namespace titan

#pragma once

// What is computed of a tensor's bytes on their way to a file.

#include <cstddef>
#include <cstdint>
#include <span>

#include <c10/core/ScalarType.h>

#include "titan/checkpoint/rank_file.h"

namespace titan::checkpoint::detail {

/// How many checksums a tensor of so many bytes has.
constexpr int64_t num_blocks(int64_t num_bytes) {
  return num_bytes / kBlockBytes + (num_bytes % kBlockBytes != 0 ? 1 : 0);
}

/// XXH3, 64 bits, without a seed.
uint64_t checksum_of(std::span<const std::byte> block);

/// Whether no element is infinite or not a number. `bytes` holds whole elements; of other than floating
/// dtypes all are finite.
bool all_finite(std::span<const std::byte> bytes, at::ScalarType dtype);

}  // namespace titan::checkpoint::detail

#pragma once

// Whether the memory that is left (core/memory_limits.h) is enough for several processes.

#include <cstdint>
#include <optional>
#include <vector>

#include "core/memory_limits.h"

namespace titan::checkpoint::detail {

/// The memory that a process will need, and its limits.
struct MemoryNeed {
  int64_t bytes = 0;
  std::vector<MemoryLimit> limits;
};

struct MemoryUse {
  MemoryLimit limit;
  int64_t wanted_bytes = 0;  ///< the sum over all processes that it limits
};

/// The limit that has the least memory left when all processes of a host have taken what they need; nothing
/// if there is no limit. If processes report different free amounts, the smallest counts.
std::optional<MemoryUse> tightest(const std::vector<MemoryNeed>& needs);

}  // namespace titan::checkpoint::detail

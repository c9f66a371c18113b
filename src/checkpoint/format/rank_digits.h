#pragma once

// The number of a rank as digits: one for each axis of a layout, the others tell the copies of a part apart.

#include <cstdint>

#include "titan/checkpoint/manifest.h"

namespace titan::checkpoint::detail {

/// The rank at position 0 on every axis that is copy number `replica` of its part: the inverse of replica_of.
int64_t rank_of_replica(const TensorLayout& layout, int64_t world_size, int64_t replica);

inline int64_t position_on(const LayoutAxis& axis, int64_t rank) { return rank / axis.stride % axis.size; }

}  // namespace titan::checkpoint::detail

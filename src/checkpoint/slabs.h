#pragma once

// Large tensors, a part at a time.

#include <cstdint>
#include <vector>

#include "titan/tensor/placement.h"

namespace titan::checkpoint {

/// Boxes that tile a tensor, in the order of its elements; each is one run of them of at most `most_bytes`,
/// or a single element. None for a tensor without elements.
std::vector<Box> slabs_of(const std::vector<int64_t>& shape, int64_t element_size, int64_t most_bytes);

}  // namespace titan::checkpoint

#pragma once

// Large tensors, a part at a time.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/checkpoint/saved_state.h"

namespace titan::cli {

/// Boxes that tile a tensor, in the order of its elements; each is one run of them of at most `most_bytes`,
/// or a single element. None for a tensor without elements.
std::vector<Box> slabs_of(const std::vector<int64_t>& shape, int64_t element_size, int64_t most_bytes);

/// What is in memory at a time.
constexpr int64_t kSlabBytes = 16 << 20;

/// The elements in `box`, contiguous.
at::Tensor read_slab(const checkpoint::SavedState& state, const std::string& name, const Box& box);

}  // namespace titan::cli

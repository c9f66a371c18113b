#pragma once

// A saved state's tensors, a part at a time.

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

#include "checkpoint/slabs.h"
#include "titan/checkpoint/saved_state.h"

namespace titan::cli {

/// What is in memory at a time.
constexpr int64_t kSlabBytes = 16 << 20;

/// The elements in `box`, contiguous.
at::Tensor read_slab(const checkpoint::SavedState& state, const std::string& name, const Box& box);

}  // namespace titan::cli

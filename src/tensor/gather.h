#pragma once

// Putting a tensor together from its parts on several ranks.

#include <vector>

#include "titan/tensor/dtensor.h"

namespace titan::detail {

/// `tensor` after its parts along the mesh axes `axes` came together on each of their ranks. These axes
/// become Replicate, and the box grows to what they cover, which must be a box. Blocking; collective over the
/// axes. Where each part lies is exchanged too, so parts that don't follow local_box's rule (a
/// tensor-parallel part that fully_shard split again) are gathered as well.
DTensor gather_axes(const DTensor& tensor, const std::vector<size_t>& axes);

}  // namespace titan::detail

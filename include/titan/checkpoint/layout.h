#pragma once

// Where every rank's part of a tensor lies, as a rule: known to all without asking anyone, and small enough
// to stand in a manifest.

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "titan/dist/device_mesh.h"
#include "titan/tensor/dtensor.h"
#include "titan/tensor/placement.h"

namespace titan::checkpoint {

/// An axis of the world's grid by the ranks' numbers: rank r stands at (r / stride) % size on it. Either it
/// cuts the tensor along `dim`, or only the ranks at position `only` have the tensor (a pipeline's stage).
struct LayoutAxis {
  std::string name;  ///< "tp": for people
  int64_t size = 1;
  int64_t stride = 1;
  int64_t dim = -1;
  int64_t only = -1;
  friend auto operator<=>(const LayoutAxis&, const LayoutAxis&) = default;
};

/// In the order in which they cut what is left (chunk_of). Ranks that differ on no listed axis have copies of
/// the same part.
struct TensorLayout {
  std::vector<LayoutAxis> axes;
  friend auto operator<=>(const TensorLayout&, const TensorLayout&) = default;
};

/// The layout of a tensor that the ranks at this rank's position in `pipeline` (one axis, or empty) have.
/// Axes of size 1 and those that the tensor is whole on have no entry. Throws Error for a Partial tensor, and
/// where `tensor.box` isn't what the rule says of this rank.
TensorLayout layout_of(const DTensor& tensor, const DeviceMesh& pipeline = {});

/// Throws Error, saying what, unless the axes are independent digits of the numbers of `world_size` ranks,
/// the dims are the shape's, and the shape has at most 2^56 elements (counting sizes of 0 as 1) and 64
/// dimensions. Then the parts of the ranks, each counted once, tile the tensor: chunk_of tiles a dimension,
/// and every combination of positions is some rank's.
void check_layout(const TensorLayout& layout, const std::vector<int64_t>& shape, int64_t world_size);

// Of a layout that was checked:

bool holds(const TensorLayout& layout, int64_t rank);
/// The part of a rank that holds the tensor; may be empty.
Box box_of(const TensorLayout& layout, const std::vector<int64_t>& shape, int64_t rank);
/// How many ranks have the same part.
int64_t num_replicas(const TensorLayout& layout, int64_t world_size);
/// Which of these a rank is: 0 ... num_replicas - 1, ascending with the rank.
int64_t replica_of(const TensorLayout& layout, int64_t world_size, int64_t rank);

}  // namespace titan::checkpoint

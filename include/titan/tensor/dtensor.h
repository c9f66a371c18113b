#pragma once

// DTensor: a local tensor and a description of the global tensor that it is part of. There is no dispatch
// mechanism: operations work on `local`.
//
//   DTensor rows = distribute(whole, mesh, {Placement::shard(0)});
//   at::Tensor again = full_tensor(rows);

#include <ATen/core/Tensor.h>

#include "titan/dist/device_mesh.h"
#include "titan/tensor/placement.h"

namespace titan {

struct DTensor {
  at::Tensor local;                   ///< this rank's part; may have zero elements
  DeviceMesh mesh;                    ///< one axis per placement, in the same order
  std::vector<Placement> placements;  ///< one per mesh axis
  std::vector<int64_t> global_shape;
  Box box;  ///< the place of `local` in the global tensor, after all axes have cut it
  /// Indices of the mesh's axes in the order in which they cut the tensor; empty: from left to right.
  std::vector<int> cut_order = {};

  int64_t global_numel() const;
  bool is_replicated_on(size_t axis) const { return placements[axis].is_replicate(); }
};

/// Returns the whole tensor on every rank, gathered over Shard axes and summed over Partial axes. Blocking;
/// collective over the mesh.
at::Tensor full_tensor(const DTensor& tensor);
/// This rank's part of a tensor that every rank has.
DTensor distribute(const at::Tensor& whole, const DeviceMesh& mesh, std::vector<Placement> placements);
/// The same tensor with other placements: Shard<->Replicate<->Shard, Partial->Replicate, Partial->Shard.
/// Blocking; collective over the mesh.
DTensor redistribute(const DTensor& tensor, std::vector<Placement> placements);
/// The box of `local` for this shape, these placements and this rank's coordinates. The axes cut the tensor
/// in `cut_order`.
Box local_box(const std::vector<int64_t>& global_shape, const DeviceMesh& mesh,
              const std::vector<Placement>& placements, const std::vector<int>& cut_order = {});

}  // namespace titan

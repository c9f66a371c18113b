#pragma once

// DTensor: a local tensor and what it is a part of. A description, not a dispatch mechanism: operations work
// on `local`.
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
  Box box;  ///< where `local` lies in the global tensor; sharded twice on one dim, the final part
  /// The mesh's axes, by position, in the order in which they cut the tensor; empty: from left to right.
  std::vector<int> cut_order = {};

  int64_t global_numel() const;
  bool is_replicated_on(size_t axis) const { return placements[axis].is_replicate(); }
};

/// The whole tensor on every rank (blocking, collective over the mesh): Shard axes gathered, Partial axes
/// summed.
at::Tensor full_tensor(const DTensor& tensor);
/// This rank's part of a tensor that every rank holds.
DTensor distribute(const at::Tensor& whole, const DeviceMesh& mesh, std::vector<Placement> placements);
/// The same tensor under other placements (blocking, collective). Shard<->Replicate<->Shard,
/// Partial->Replicate, Partial->Shard.
DTensor redistribute(const DTensor& tensor, std::vector<Placement> placements);
/// The box of `local` for these placements, this shape and this rank's coordinates; axes cut the tensor in
/// `cut_order`.
Box local_box(const std::vector<int64_t>& global_shape, const DeviceMesh& mesh,
              const std::vector<Placement>& placements, const std::vector<int>& cut_order = {});

}  // namespace titan

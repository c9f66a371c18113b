#pragma once

// The process groups that a group of parameters communicates over, from its mesh.

#include <memory>

#include "titan/dist/device_mesh.h"
#include "titan/parallel/fsdp.h"

namespace titan::fsdp {

struct MeshGroups {
  int shard_size = 1;
  int shard_rank = 0;
  std::shared_ptr<dist::Group> gather;  ///< shard axis; null for one rank
  std::shared_ptr<dist::Group>
      reduce;  ///< the same ranks, a group of its own: see [Note: order of collectives]
  std::shared_ptr<dist::Group> replicate;     ///< null for one rank
  std::shared_ptr<dist::Group> small_gather;  ///< ReshardAfterForward::to_size; null without
};

/// Collective over the world in the sense of World::group. Throws Error for a mesh of more than two axes and
/// for a size that doesn't divide the shard axis.
MeshGroups mesh_groups(const DeviceMesh& mesh, const ReshardAfterForward& reshard);

}  // namespace titan::fsdp

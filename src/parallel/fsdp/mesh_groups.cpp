#include "parallel/fsdp/mesh_groups.h"

#include "titan/core/error.h"

namespace titan::fsdp {

namespace {

std::shared_ptr<dist::Group> small_group(const DeviceMesh& shard, int size) {
  TITAN_CHECK(size > 0 && shard.size() % size == 0, "fully_shard: reshard_after_forward to ", size,
              " ranks, but the shard axis has ", shard.size(), "; allowed: its divisors");
  if (size == 1 || size == shard.size()) return nullptr;
  const int first = shard.rank() / size * size;
  const std::vector<int> neighbours(shard.ranks().begin() + first, shard.ranks().begin() + first + size);
  return shard.world().group(neighbours, shard.axes()[0].name + ".gather" + std::to_string(size), "gather");
}

}  // namespace

MeshGroups mesh_groups(const DeviceMesh& mesh, const ReshardAfterForward& reshard) {
  TITAN_CHECK(mesh.num_axes() <= 2, "fully_shard: the mesh has ", mesh.num_axes(),
              " axes; allowed: (shard) or (replicate, shard)");
  MeshGroups groups;
  if (mesh.num_axes() == 0) return groups;
  const DeviceMesh shard = mesh[mesh.axes().back().name];
  groups.shard_size = shard.size();
  groups.shard_rank = shard.rank();
  if (shard.size() > 1) {
    groups.gather = shard.group();
    groups.reduce = shard.world().group(shard.ranks(), shard.axes()[0].name + ".reduce", "reduce");
    if (reshard.kind == ReshardAfterForward::Kind::ToSize)
      groups.small_gather = small_group(shard, reshard.size);
  }
  if (mesh.num_axes() == 2) {
    const DeviceMesh replicate = mesh[mesh.axes().front().name];
    if (replicate.size() > 1) groups.replicate = replicate.group();
  }
  return groups;
}

}  // namespace titan::fsdp

#include "titan/train/parallel_dims.h"

namespace titan::train {

int Meshes::dp_rank() const { return batch.rank(); }
int Meshes::dp_degree() const { return batch.size(); }

Meshes build_meshes(const dist::World& world, const ParallelDims& dims) {
  Meshes meshes;
  meshes.world = DeviceMesh::create(world, {{"pp", dims.pp},
                                            {"dp_replicate", dims.dp_replicate},
                                            {"dp_shard", dims.dp_shard},
                                            {"cp", dims.cp},
                                            {"tp", dims.tp}});
  meshes.pp = meshes.world["pp"];
  meshes.stage = meshes.world.flatten({"dp_replicate", "dp_shard", "cp", "tp"}, "stage");
  const char* shard = "dp_shard";
  if (dims.cp > 1) {
    shard = "fsdp";
    meshes.world.flatten({"dp_shard", "cp"}, shard);
  }
  meshes.fsdp = dims.dp_replicate > 1 ? meshes.world({"dp_replicate", shard}) : meshes.world[shard];
  meshes.batch = meshes.world.flatten({"dp_replicate", "dp_shard"}, "batch");
  meshes.cp = meshes.world["cp"];
  meshes.tp = meshes.world["tp"];
  meshes.loss = meshes.world.flatten({"pp", "dp_replicate", "dp_shard", "cp"}, "loss");
  return meshes;
}

}  // namespace titan::train

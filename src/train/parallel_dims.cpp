#include "titan/train/parallel_dims.h"

#include <algorithm>

namespace titan::train {

namespace {

// The row axes of `dims`, preceded by one-rank axes for the default parallelisms that `dims` doesn't name.
std::vector<RowAxis> mesh_rows(const ParallelDims& dims) {
  std::vector<RowAxis> rows;
  for (RowAxis& axis : row_axes(default_parallelisms())) {
    const auto is_same = [&](const RowAxis& given) { return given.name == axis.name; };
    if (std::none_of(dims.rows.begin(), dims.rows.end(), is_same)) rows.push_back(std::move(axis));
  }
  rows.insert(rows.end(), dims.rows.begin(), dims.rows.end());
  return rows;
}

using Names = std::vector<std::string>;

Names joined(Names names, const Names& more) {
  names.insert(names.end(), more.begin(), more.end());
  return names;
}

}  // namespace

Meshes build_meshes(const dist::World& world, const ParallelDims& dims) {
  const std::vector<RowAxis> row_axes = mesh_rows(dims);
  std::vector<MeshAxis> axes = {
      {"pp", dims.pp}, {"dp_replicate", dims.dp_replicate}, {"dp_shard", dims.dp_shard}};
  Names rows;
  for (const RowAxis& axis : row_axes) {
    axes.push_back({axis.name, axis.degree});
    rows.push_back(axis.name);
  }
  axes.push_back({"tp", dims.tp});
  Meshes meshes;
  meshes.world = DeviceMesh::create(world, std::move(axes));
  meshes.pp = meshes.world["pp"];
  meshes.stage = meshes.world.flatten(joined(joined({"dp_replicate", "dp_shard"}, rows), {"tp"}), "stage");
  std::string shard = "dp_shard";
  if (dims.row_degree() > 1) {
    shard = "fsdp";
    meshes.world.flatten(joined({"dp_shard"}, rows), shard);
  }
  meshes.fsdp = dims.dp_replicate > 1 ? meshes.world({"dp_replicate", shard}) : meshes.world[shard];
  meshes.batch = meshes.world.flatten({"dp_replicate", "dp_shard"}, "batch");
  meshes.rows = rows.size() == 1 ? meshes.world[rows.front()] : meshes.world.flatten(rows, "rows");
  meshes.tp = meshes.world["tp"];
  meshes.loss = meshes.world.flatten(joined({"pp", "dp_replicate", "dp_shard"}, rows), "loss");
  for (const RowAxis& axis : row_axes)
    if (axis.degree > 1)
      meshes.row_axes.push_back({axis.kind.empty() ? axis.name : axis.kind, meshes.world[axis.name]});
  return meshes;
}

}  // namespace titan::train

#pragma once

// How many ranks each kind of parallelism takes, and the meshes of such a world.

#include <string>
#include <vector>

#include "titan/dist/device_mesh.h"
#include "titan/parallel/parallelism.h"

namespace titan::train {

/// How many ranks each kind of parallelism takes. Resolved: every degree >= 1 and the product is the world's
/// size.
struct ParallelDims {
  int dp_replicate = 1;
  int dp_shard = 1;
  std::vector<RowAxis> rows = {};  ///< axes of registered parallelisms, whose ranks share rows
  bool sequence_parallel = true;   ///< tp ranks have parts of the sequence
  int tp = 1;
  int pp = 1;

  /// Ranks that read different rows of a batch.
  int batch_degree() const { return dp_replicate * dp_shard; }
  /// Ranks that share a row, not counting tensor parallelism.
  int row_degree() const {
    int degree = 1;
    for (const RowAxis& axis : rows) degree *= axis.degree;
    return degree;
  }
  int world_size() const { return pp * dp_replicate * dp_shard * row_degree() * tp; }
};

/// The axis of one registered parallelism.
struct RowMesh {
  std::string kind;  ///< "context"; the axis's own name for an axis without a registered parallelism
  DeviceMesh mesh;
};

/// The grid pp, dp_replicate, dp_shard, the axes whose ranks share rows (cp), tp (row-major, tp fastest) and the
/// sub-meshes that the trainer uses.
struct Meshes {
  DeviceMesh world;
  DeviceMesh pp;     ///< pipeline parallel, one axis
  DeviceMesh stage;  ///< ranks that have the same stages: all but pp, one axis
  DeviceMesh
      fsdp;  ///< what parameters are sharded over: (dp_replicate,) dp_shard x rows, the latter one axis
  DeviceMesh batch;  ///< ranks that read different rows: dp_replicate x dp_shard, one axis
  DeviceMesh loss;   ///< ranks whose losses add up: pp x dp_replicate x dp_shard x rows, one axis
  DeviceMesh rows;   ///< ranks that share the rows of a batch, one axis
  DeviceMesh tp;     ///< tensor parallel, one axis
  std::vector<RowMesh> row_axes;  ///< what `rows` is made of: axes of two ranks or more

  int dp_rank() const { return batch.rank(); }  ///< which lanes of the batch are this rank's
  int dp_degree() const { return batch.size(); }
};

/// Collective over the world.
Meshes build_meshes(const dist::World& world, const ParallelDims& dims);

}  // namespace titan::train

#pragma once

// The number of ranks in each kind of parallelism, and the device meshes that follow from it:
//
//   const titan::train::ParallelDims dims{.dp_shard = 4, .tp = 2};  // a world of 8 ranks
//   const titan::train::Meshes meshes = titan::train::build_meshes(world, dims);
//   titan::fully_shard(model, {.mesh = meshes.fsdp});

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "titan/dist/device_mesh.h"
#include "titan/parallel/parallelism.h"

namespace titan::train {

/// Number of ranks in each kind of parallelism, with automatic values resolved: every degree is at least 1,
/// and their product is the world's size.
struct ParallelDims {
  int dp_replicate = 1;
  int dp_shard = 1;
  std::vector<RowAxis> rows = {};  ///< axes of registered parallelisms, whose ranks share rows
  bool sequence_parallel = true;   ///< each tp rank has a part of the sequence
  int tp = 1;
  int pp = 1;

  /// Number of ranks that read different rows of a batch.
  int batch_degree() const { return product(dp_replicate, dp_shard); }
  /// Number of ranks that share a row, not counting tensor parallelism.
  int row_degree() const {
    int degree = 1;
    for (const RowAxis& axis : rows) degree = product(degree, axis.degree);
    return degree;
  }
  int world_size() const {
    return product(product(product(dp_replicate, dp_shard), product(row_degree(), tp)), pp);
  }
  /// The largest int if it is larger: degrees that no world has.
  static int product(int64_t a, int64_t b) {
    return static_cast<int>(std::min<int64_t>(a * b, std::numeric_limits<int>::max()));
  }
};

/// The mesh axis of one parallelism whose ranks share rows.
struct RowMesh {
  std::string kind;  ///< the parallelism, such as "context"; the axis's name if none is registered
  DeviceMesh mesh;
};

/// The grid of the axes pp, dp_replicate, dp_shard, those whose ranks share rows (cp), and tp, row-major with
/// tp fastest; and the sub-meshes that the trainer uses.
struct Meshes {
  DeviceMesh world;
  DeviceMesh pp;     ///< pipeline parallel, one axis
  DeviceMesh stage;  ///< ranks that have the same stages: all but pp, one axis
  /// For fully_shard: dp_replicate if it has several ranks, and dp_shard x rows as one axis.
  DeviceMesh fsdp;
  DeviceMesh batch;  ///< ranks that read different rows: dp_replicate x dp_shard, one axis
  DeviceMesh loss;   ///< ranks whose losses add up: pp x dp_replicate x dp_shard x rows, one axis
  DeviceMesh rows;   ///< ranks that share the rows of a batch, one axis
  DeviceMesh tp;     ///< tensor parallel, one axis
  std::vector<RowMesh> row_axes;  ///< the axes in `rows` that have several ranks

  int dp_rank() const { return batch.rank(); }  ///< selects this rank's lanes of the batch
  int dp_degree() const { return batch.size(); }
  /// Whether this rank is the one that counts for all ranks with the same rows.
  bool is_first_of_its_rows() const { return pp.rank() == 0 && rows.rank() == 0 && tp.rank() == 0; }
};

/// Collective over the world.
Meshes build_meshes(const dist::World& world, const ParallelDims& dims);

}  // namespace titan::train

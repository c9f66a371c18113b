#pragma once

// How many ranks each kind of parallelism takes, and the meshes of such a world.

#include "titan/dist/device_mesh.h"

namespace titan::train {

/// How many ranks each kind of parallelism takes. Resolved: every degree >= 1 and the product is the world's
/// size.
struct ParallelDims {
  int dp_replicate = 1;
  int dp_shard = 1;
  int cp = 1;
  bool sequence_parallel = true;  ///< tp ranks have parts of the sequence
  int cp_chunks = 2;              ///< of a sequence, for each context-parallel rank
  int tp = 1;
  int pp = 1;

  /// Ranks that read different rows of a batch.
  int batch_degree() const { return dp_replicate * dp_shard; }
  int world_size() const { return pp * dp_replicate * dp_shard * cp * tp; }
};

/// The grid pp, dp_replicate, dp_shard, cp, tp (row-major, tp fastest) and the sub-meshes that the trainer
/// uses.
struct Meshes {
  DeviceMesh world;
  DeviceMesh pp;     ///< pipeline parallel, one axis
  DeviceMesh stage;  ///< ranks that have the same stages: all but pp, one axis
  DeviceMesh fsdp;   ///< what parameters are sharded over: (dp_replicate,) dp_shard x cp, the latter one axis
  DeviceMesh batch;  ///< ranks that read different rows: dp_replicate x dp_shard, one axis
  DeviceMesh loss;   ///< ranks whose losses add up: pp x dp_replicate x dp_shard x cp, one axis
  DeviceMesh cp;     ///< context parallel, one axis
  DeviceMesh tp;     ///< tensor parallel, one axis

  int dp_rank() const;  ///< which lanes of the batch are this rank's
  int dp_degree() const;
};

/// Collective over the world.
Meshes build_meshes(const dist::World& world, const ParallelDims& dims);

}  // namespace titan::train

#pragma once

// [parallelism], and what follows from it: degrees checked against the world before any process group exists,
// then meshes.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "titan/config/table.h"
#include "titan/dist/device_mesh.h"
#include "titan/parallel/context_parallel.h"
#include "titan/parallel/fsdp.h"
#include "titan/parallel/tensor_parallel.h"

namespace titan::train {

struct ModelSizes;

/// [parallelism]
struct ParallelismSettings {
  int64_t data_parallel_replicate_degree = 1;
  int64_t data_parallel_shard_degree = -1;  ///< -1: what the other degrees leave of the world
  std::string fsdp_reshard_after_forward =
      "default";  ///< "default", "always", "never", or a divisor of the shard degree
  bool fsdp_reduce_every_micro_batch =
      true;          ///< false: whole gradients are kept until the last micro-batch of a step
  std::string plan;  ///< of parallel_plans(); "": the model family's own

  int64_t tensor_parallel_degree = 1;
  bool enable_sequence_parallel = true;       ///< with tensor parallelism, between its products
  bool enable_async_tensor_parallel = false;  ///< overlap its products with the exchange of their parts
  std::string async_tensor_parallel_transport = "auto";  ///< or "symmetric_memory", "send_receive"
  bool disable_loss_parallel = false;                    ///< compute the loss from gathered logits

  ContextParallelSettings context;  ///< context_parallel_degree, ...
  /// [parallelism.args]: settings of parallelisms that a shared object registered, by name. Copies share them.
  std::shared_ptr<std::map<std::string, std::shared_ptr<void>>> args =
      std::make_shared<std::map<std::string, std::shared_ptr<void>>>();

  /// Settings of a registered parallelism; null where none were read: its defaults.
  const void* settings_of(const std::string& name) const;

  int64_t pipeline_parallel_degree = 1;             ///< ranks, which may have several stages each
  std::string pipeline_parallel_schedule = "1F1B";  ///< in any case; see pipeline_generators.h
  std::string pipeline_parallel_schedule_csv;       ///< a file, in place of what the schedule's name makes
  int64_t pipeline_parallel_microbatch_size = 1;    ///< sequences; a divisor of the local batch size
  std::optional<int64_t> pipeline_parallel_max_live_activations;  ///< of a rank, per stage; unset: no limit
  std::string pipeline_parallel_split = "torchtitan";         ///< or "balanced": by what each module costs
  std::optional<double> pipeline_parallel_split_memory_gib;   ///< of a rank, with "balanced"; unset: no limit
  std::optional<int64_t> pipeline_parallel_layers_per_stage;  ///< unset: as few stages as the schedule takes
  int64_t pipeline_parallel_first_stage_less_layers = 1;      ///< what the embedding counts for
  int64_t pipeline_parallel_last_stage_less_layers = 1;       ///< and the head
  std::optional<std::vector<config::StringList>>
      module_fqns_per_model_part;  ///< of each stage; unset: by the split
};

void describe(config::Table<ParallelismSettings>& table);

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
  /// Ranks that share a row, tensor parallelism aside.
  int row_degree() const {
    int degree = 1;
    for (const RowAxis& axis : rows) degree *= axis.degree;
    return degree;
  }
  int world_size() const { return pp * dp_replicate * dp_shard * row_degree() * tp; }
};

/// What is wrong with the value of a key.
struct KeyedProblem {
  std::string key;
  std::string what;
};

/// What parallelism over the tokens of a sequence asks of its length, the value of `key`; adds what is wrong
/// to `problems`.
void check_sequence_length(const ParallelDims& dims, const std::string& key, int64_t seq_len,
                           std::vector<KeyedProblem>& problems);

/// Fills in dp_shard = -1 and checks the degrees against the world; adds what is wrong to `problems`.
ParallelDims resolve_parallel_dims(const ParallelismSettings& settings, int world_size,
                                   std::vector<std::string>& problems);

/// The checks of tensor parallelism and of axes that share rows on sequence length and model; adds what is wrong to
/// `problems`.
void check_divisibility(const ParallelDims& dims, const ModelSizes& sizes, int64_t seq_len,
                        std::vector<KeyedProblem>& problems);

/// The grid pp, dp_replicate, dp_shard, the axes that share rows ("cp"), tp (row-major, tp fastest) and the
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

  int dp_rank() const;  ///< which lanes of the batch are this rank's
  int dp_degree() const;
};

/// Collective over the world.
Meshes build_meshes(const dist::World& world, const ParallelDims& dims);

/// The registered parallelisms with their settings in [parallelism].
std::vector<Parallelism> chosen_parallelisms(const ParallelismSettings& settings);
/// The axes of those that a mesh of this job has.
std::vector<RowAxis> row_axes(const ParallelismSettings& settings);

OverlapTransport overlap_transport(const ParallelismSettings& settings);

/// Throws ConfigError unless it is "default", "always", "never" or an integer.
ReshardAfterForward reshard_policy(const std::string& name);

}  // namespace titan::train

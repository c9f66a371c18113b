#pragma once

// [parallelism] and [activation_checkpoint]: how ranks share the work, and what a job's other settings have
// to do with it.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "titan/config/table.h"
#include "titan/parallel/context_parallel.h"
#include "titan/parallel/fsdp.h"
#include "titan/parallel/tensor_parallel.h"
#include "titan/train/model_spec.h"
#include "titan/train/parallel_dims.h"

namespace titan::train {

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
  /// [parallelism.args]: the parallelisms that a shared object registered; `settings` are ParallelismArgs.
  config::DynamicTable args = {};

  int64_t pipeline_parallel_degree = 1;             ///< ranks, which may have several stages each
  std::string pipeline_parallel_schedule = "1F1B";  ///< in any case; see pipeline_schedule.h
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

  /// The settings of a registered parallelism; null where none were read: its defaults.
  const void* settings_of(const std::string& name) const;
  /// Leaves copies of these settings as they are.
  void set_degree(const std::string& name, int64_t degree);
};

void describe(config::Table<ParallelismSettings>& table);

/// A problem with the value of a key.
struct KeyedProblem {
  std::string key;
  std::string what;
};

/// Checks a sequence length, the value of `key`, against parallelism over its tokens; adds what is wrong to
/// `problems`.
void check_sequence_length(const ParallelDims& dims, const std::string& key, int64_t seq_len,
                           std::vector<KeyedProblem>& problems);

/// Fills in dp_shard = -1 and checks the degrees against the world; adds what is wrong to `problems`.
ParallelDims resolve_parallel_dims(const ParallelismSettings& settings, int world_size,
                                   std::vector<std::string>& problems);

/// Checks sequence length and model against tensor parallelism and axes that share rows; adds what is wrong to
/// `problems`.
void check_divisibility(const ParallelDims& dims, const ModelSizes& sizes, int64_t seq_len,
                        std::vector<KeyedProblem>& problems);

/// All registered parallelisms with their settings in [parallelism].
std::vector<Parallelism> chosen_parallelisms(const ParallelismSettings& settings);

OverlapTransport overlap_transport(const ParallelismSettings& settings);

/// Throws ConfigError unless it is "default", "always", "never" or an integer.
ReshardAfterForward reshard_policy(const std::string& name);

/// [activation_checkpoint]
struct ActivationCheckpointSettings {
  std::string mode = "none";              ///< "none", "full", "selective", "offload" or "memory_budget"
  std::string selective_ac_option = "2";  ///< "op", or every so many layers
  config::StringList per_op_sac_force_recompute_mm_shapes_by_fqns = {"moe.router.gate"};
  bool early_stop = true;
  bool preserve_rng_state = true;
  std::string determinism_check = "default";
  double memory_budget = 0.5;  ///< from full recomputation (0) to none (1)
  std::optional<int64_t>
      memory_budget_bytes;  ///< the same in bytes of a rank, for all forwards that are under way
};

void describe(config::Table<ActivationCheckpointSettings>& table);

/// `group`: the ranks that have to agree on one choice under a memory budget.
ActivationCheckpoint activation_checkpoint(const ActivationCheckpointSettings& settings,
                                           std::shared_ptr<dist::Group> group);

}  // namespace titan::train

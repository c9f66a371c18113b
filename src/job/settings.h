#pragma once

// The tables [model], [training], [parallelism], [activation_checkpoint], [job], [debug], [experimental] and
// [comm] of a job.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include "titan/config/table.h"
#include "titan/data/loader.h"
#include "titan/data/source.h"
#include "titan/parallel/context_parallel.h"
#include "titan/parallel/fsdp.h"
#include "titan/parallel/tensor_parallel.h"
#include "titan/train/model_spec.h"
#include "titan/train/parallel_dims.h"

namespace titan::train {

/// [model]; the keys of [model.args] come from the model's ModelSpec.
struct ModelSettings {
  std::string name = "llama3";
  std::string flavor = "debugmodel";
  std::string hf_assets_path = "./assets/tokenizer";  ///< folder with tokenizer.json, or "bytes"
  config::StringList converters;  ///< rewrites of the built model, such as "quantize.linear.float8"
  bool print_after_conversion = false;

  bool converts(const std::string& name) const;
};

/// [training]
struct TrainingSettings {
  std::string dataset = "cpp_headers";
  std::optional<std::string> dataset_path;
  int64_t local_batch_size = 8;    ///< sequences per data-parallel rank and micro-batch
  int64_t global_batch_size = -1;  ///< per optimizer step; -1: local_batch_size x data-parallel ranks
  int64_t seq_len = 2048;
  double max_norm = 1.0;
  int64_t steps = 10000;
  data::DataloaderSettings dataloader;
  bool enable_cpu_offload = false;
  std::string dtype = "float32";
  std::string mixed_precision_param = "bfloat16";
  std::string mixed_precision_reduce = "float32";
  std::string device = "auto";  ///< "auto" (a GPU if there is one), "cpu", "cuda"

  /// The number of batches, of `dp_degree` ranks each, that an optimizer step accumulates.
  int64_t batches_per_step(int dp_degree) const;
};

void describe(config::Table<ModelSettings>& table);
void describe(config::Table<TrainingSettings>& table);

/// LibTorch's type for "float32", "bfloat16", "float16" or "float64". Throws ConfigError for another name.
at::ScalarType scalar_type(const std::string& name);

/// [job]
struct JobSettings {
  std::optional<std::string> config_file;  ///< the same as the positional argument of `titan train`
  std::string dump_folder = "./outputs";   ///< root of everything that a run writes
  std::string description = "default job";
  bool print_config = false;  ///< log the resolved config at the start
  /// A JSON file under dump_folder; config.toml is always written there.
  std::optional<std::string> save_config_file;
};

/// [debug]
struct DebugSettings {
  /// Seeds the weights, the data's order if data.seed is unset, and, plus the data-parallel rank,
  /// LibTorch's own generators (dropout). Unset: 0, so that equal configs give equal runs.
  std::optional<int64_t> seed;
  bool deterministic = false;
  bool deterministic_warn_only = false;
  bool check_collectives = false;  ///< dist::InitOptions::check_collectives
  bool detect_anomaly = false;     ///< NanSearch (guard/nan_search.h): operations
  bool nan_trace = false;          ///< NanSearch: modules

  uint64_t seed_or_default() const { return static_cast<uint64_t>(seed.value_or(0)); }
};

/// [experimental]
struct ExperimentalSettings {
  std::string custom_import;  ///< a shared object with `extern "C" void titan_register()`; "" for none
};

void describe(config::Table<JobSettings>& table);
void describe(config::Table<DebugSettings>& table);
void describe(config::Table<ExperimentalSettings>& table);

/// [compile]
struct CompileSettings {
  bool enable = false;  ///< record steps as CUDA graphs
};

void describe(config::Table<CompileSettings>& table);

// A table of TorchTitan whose feature doesn't exist here (yet). Its keys are known, so that a TorchTitan
// config is read, and the key that would turn the feature on is refused: a setting that can't be honoured is
// an error, never a warning.

/// [memory_estimation]
struct MemoryEstimationSettings {};

void describe(config::Table<MemoryEstimationSettings>& table);

/// [comm]
struct CommSettings {
  int64_t init_timeout_seconds = 300;   ///< rendezvous, and all but data and checkpoints in the first step
  int64_t train_timeout_seconds = 100;  ///< computing and collectives after it, without progress
  int64_t data_timeout_seconds = 600;   ///< waiting for data
  /// Loading and saving without progress; unset: checkpoint.timeout_seconds and a minute.
  std::optional<int64_t> checkpoint_timeout_seconds;
  bool watchdog = true;            ///< ends a job that exceeds them, and reports where each rank was
  int64_t trace_buf_size = 20000;  ///< calls that the flight recorder keeps; 0: none
  std::string save_traces_folder = "comm_traces";  ///< its records, under job.dump_folder
  std::string save_traces_file_prefix = "rank_";   ///< followed by the rank and .json
  std::string backend = "auto";                    ///< "auto" (nccl on GPUs, gloo on CPUs), "gloo", "nccl"
  std::string mode = "default";                    ///< "fake_backend": rank 0 of ranks that don't exist
  bool register_buffers = false;                   ///< FSDP's, with NCCL
};

void describe(config::Table<CommSettings>& table);

/// [parallelism]
struct ParallelismSettings {
  int64_t data_parallel_replicate_degree = 1;
  int64_t data_parallel_shard_degree = -1;  ///< -1: the ranks that the other degrees leave
  /// "default", "always", "never", or a divisor of the shard degree.
  std::string fsdp_reshard_after_forward = "default";
  /// False: whole gradients are kept until the last micro-batch of a step.
  bool fsdp_reduce_every_micro_batch = true;
  std::string plan;  ///< a name in parallel_plans(); "": the model family's own

  /// Whether the plan chooses one ("auto"), which is 0 here until it has.
  bool has_auto_degree() const;

  int64_t tensor_parallel_degree = 1;
  bool enable_sequence_parallel = true;       ///< with tensor parallelism, between its products
  bool enable_async_tensor_parallel = false;  ///< overlap its products with the exchange of their parts
  std::string async_tensor_parallel_transport = "auto";  ///< or "symmetric_memory", "send_receive"
  bool disable_loss_parallel = false;                    ///< compute the loss from gathered logits

  ContextParallelSettings context;  ///< context_parallel_degree, ...
  /// [parallelism.args]: the parallelisms that a shared object registered; `settings` are ParallelismArgs.
  config::DynamicTable args = {};

  int64_t pipeline_parallel_degree = 1;             ///< ranks, which may have several stages each
  std::string pipeline_parallel_schedule = "1F1B";  ///< case is ignored; see pipeline_schedule.h
  std::string pipeline_parallel_schedule_csv;       ///< a file, instead of a named schedule
  int64_t pipeline_parallel_microbatch_size = 1;    ///< sequences; a divisor of the local batch size
  std::optional<int64_t> pipeline_parallel_max_live_activations;  ///< forwards on a rank; unset: no limit
  std::string pipeline_parallel_split = "torchtitan";             ///< or "balanced", by the modules' costs
  std::optional<double> pipeline_parallel_split_memory_gib;       ///< per rank, if balanced; unset: no limit
  std::optional<int64_t> pipeline_parallel_layers_per_stage;  ///< unset: as few stages as the schedule takes
  int64_t pipeline_parallel_first_stage_less_layers = 1;      ///< layers that the embedding counts for
  int64_t pipeline_parallel_last_stage_less_layers = 1;       ///< layers that norm and head count for
  /// The modules of each stage; unset: chosen by the split.
  std::optional<std::vector<config::StringList>> module_fqns_per_model_part;

  /// The settings of a registered parallelism; null if none were read, so it has its defaults.
  const void* settings_of(const std::string& name) const;
  /// Doesn't change copies of these settings.
  void set_degree(const std::string& name, int64_t degree);
};

void describe(config::Table<ParallelismSettings>& table);

/// A problem with the value of a key.
struct KeyedProblem {
  std::string key;
  std::string what;
};

/// Checks a sequence length, the value of `key`, against parallelism over its tokens, and adds to `problems`.
void check_sequence_length(const ParallelDims& dims, const std::string& key, int64_t seq_len,
                           std::vector<KeyedProblem>& problems);

/// Replaces dp_shard = -1 by the ranks that the other degrees leave.
ParallelDims resolve_parallel_dims(const ParallelismSettings& settings, int world_size);
/// The problem if the degrees don't multiply to the world size.
std::optional<std::string> world_size_problem(const ParallelDims& dims, int world_size);

/// Checks sequence length and model against tensor parallelism and axes that share rows, and adds to
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
  std::string selective_ac_option = "2";  ///< "op", or n for every n-th layer
  config::StringList per_op_sac_force_recompute_mm_shapes_by_fqns = {"moe.router.gate"};
  bool early_stop = true;
  bool preserve_rng_state = true;
  std::string determinism_check = "default";
  double memory_budget = 0.5;                  ///< from full recomputation (0) to none (1)
  std::optional<int64_t> memory_budget_bytes;  ///< the same in bytes per rank, for all forwards in flight
};

void describe(config::Table<ActivationCheckpointSettings>& table);

/// `group`: the ranks that have to agree on one choice under a memory budget.
ActivationCheckpoint activation_checkpoint(const ActivationCheckpointSettings& settings,
                                           std::shared_ptr<dist::Group> group);

}  // namespace titan::train

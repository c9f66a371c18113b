#pragma once

// The tables [model] and [training].

#include <optional>
#include <string>

#include <c10/core/ScalarType.h>

#include "titan/config/table.h"
#include "titan/data/loader.h"

namespace titan::train {

/// [model]; the keys of [model.args] come from the model's ModelSpec.
struct ModelSettings {
  std::string name = "llama3";
  std::string flavor = "debugmodel";
  std::string hf_assets_path = "./assets/tokenizer";  ///< folder with tokenizer.json, or "bytes"
  config::StringList converters;  ///< rewrites of the built model, as "quantize.linear.float8"
  bool print_after_conversion = false;

  bool converts(const std::string& name) const;
};

/// [training]
struct TrainingSettings {
  std::string dataset = "cpp_headers";
  std::optional<std::string> dataset_path;
  int64_t local_batch_size = 8;  ///< sequences per data-parallel rank and micro-batch
  int64_t global_batch_size =
      -1;  ///< sequences per optimizer step; -1: local_batch_size x data-parallel ranks
  int64_t seq_len = 2048;
  double max_norm = 1.0;
  int64_t steps = 10000;
  data::DataloaderSettings dataloader;
  bool enable_cpu_offload = false;
  std::string dtype = "float32";
  std::string mixed_precision_param = "bfloat16";
  std::string mixed_precision_reduce = "float32";
  std::string device = "auto";  ///< "auto" (a GPU when there is one), "cpu", "cuda"
};

void describe(config::Table<ModelSettings>& table);
void describe(config::Table<TrainingSettings>& table);

/// "float32", "bfloat16", "float16" or "float64" as LibTorch's. Throws ConfigError for another name.
at::ScalarType scalar_type(const std::string& name);

// The tables [job], [debug] and [experimental]: what the run is called, how it is seeded, whose code joins
// it.

/// [job]
struct JobSettings {
  std::optional<std::string> config_file;  ///< the same as the positional argument of `titan train`
  std::string dump_folder = "./outputs";   ///< root of everything that a run writes
  std::string description = "default job";
  bool print_config = false;  ///< log the resolved config at the start
  std::optional<std::string>
      save_config_file;  ///< JSON, under dump_folder; config.toml is always written there
};

/// [debug]
struct DebugSettings {
  /// Seeds the weights, the data's order where data.seed is unset, and, plus the data-parallel rank,
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

// Tables of TorchTitan whose feature doesn't exist here (yet). Their keys are known, so that a TorchTitan
// config is read, and the key that would turn the feature on is refused: a setting that can't be honoured is
// an error, never a warning.

/// [compile]
struct CompileSettings {};
/// [memory_estimation]
struct MemoryEstimationSettings {};

void describe(config::Table<CompileSettings>& table);
void describe(config::Table<MemoryEstimationSettings>& table);

/// [comm]
struct CommSettings {
  int64_t init_timeout_seconds = 300;   ///< rendezvous, and all but data and checkpoints in the first step
  int64_t train_timeout_seconds = 100;  ///< computing and collectives after it, without progress
  int64_t data_timeout_seconds = 600;   ///< waiting for data
  /// Loading and saving without progress; unset: checkpoint.timeout_seconds and a minute.
  std::optional<int64_t> checkpoint_timeout_seconds;
  bool watchdog = true;            ///< ends a job that goes over them, and says where each rank was
  int64_t trace_buf_size = 20000;  ///< calls that the flight recorder keeps; 0: none
  std::string save_traces_folder = "comm_traces";  ///< its records, under job.dump_folder
  std::string save_traces_file_prefix = "rank_";   ///< of their names; the rank and .json follow
  std::string backend = "auto";                    ///< "auto" (nccl on GPUs, gloo on CPUs), "gloo", "nccl"
};

void describe(config::Table<CommSettings>& table);

}  // namespace titan::train

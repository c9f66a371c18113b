#pragma once

// The tables [model] and [training].

#include <optional>
#include <string>

#include <c10/core/ScalarType.h>

#include "titan/config/table.h"
#include "titan/data/settings.h"

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

}  // namespace titan::train

#pragma once

// The config tables [data], [training.dataloader] and [validation.dataloader].

#include <cstdint>
#include <optional>
#include <string>

#include "titan/config/table.h"

namespace titan::data {

/// [data]: how documents are found, cut and dealt. The contents of a batch depend on these, not on the number
/// of ranks.
struct DataSettings {
  config::StringList extensions;     ///< of files in a folder, with the dot; empty: those of the kind
  std::string text_field = "text";   ///< JSON Lines: the member with a document's text
  std::string on_bad_line = "stop";  ///< JSON Lines: "stop" or "skip"
  int64_t piece_bytes = 256 << 10;   ///< longer documents are cut into pieces of this size, dealt separately
  bool shuffle = true;               ///< deal pieces in a pseudo-random order, a new one each epoch
  std::optional<int64_t> seed;       ///< of that order, and of synthetic text; unset: debug.seed
  int64_t synthetic_documents = 4096;  ///< documents of the synthetic data set
  std::string cache_folder;            ///< for indexes; empty: {job.dump_folder}/data_cache
};

/// [training.dataloader], [validation.dataloader]: when batches are prepared; doesn't change their contents.
struct DataloaderSettings {
  int64_t num_workers = 0;                 ///< threads that tokenize and pack; 0: one
  bool pin_memory = false;                 ///< page-locked batches; always used when training on a GPU
  std::optional<int64_t> prefetch_factor;  ///< steps prepared ahead; unset: 2
};

/// 0 if `seed` is unset.
inline uint64_t seed_or_default(const DataSettings& settings) {
  return static_cast<uint64_t>(settings.seed.value_or(0));
}

void describe(config::Table<DataSettings>& table);
void describe(config::Table<DataloaderSettings>& table);

}  // namespace titan::data

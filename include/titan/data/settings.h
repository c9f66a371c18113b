#pragma once

// The tables [data], [training.dataloader] and [validation.dataloader].

#include <cstdint>
#include <optional>
#include <string>

#include "titan/config/table.h"

namespace titan::data {

/// [data]: how documents are found, cut and dealt. What a batch holds depends on these, never on the number
/// of ranks.
struct DataSettings {
  config::StringList
      extensions;  ///< of files taken from a folder, with the dot; empty: those of the data set's kind
  std::string text_field = "text";   ///< JSON Lines: the member that holds a document's text
  std::string on_bad_line = "stop";  ///< JSON Lines: "stop" or "skip"
  int64_t piece_bytes =
      256 << 10;                ///< longer documents are cut into pieces of this many bytes, dealt separately
  bool shuffle = true;          ///< deal pieces in a pseudo-random order, another one each epoch
  std::optional<int64_t> seed;  ///< of that order, and of synthetic text; unset: the trainer takes debug.seed
  int64_t synthetic_documents = 4096;  ///< how many documents the synthetic data set has
  std::string cache_folder;            ///< for indexes; empty: {job.dump_folder}/data_cache
};

/// [training.dataloader], [validation.dataloader]: when the batches are made, never what they hold.
struct DataloaderSettings {
  int64_t num_workers = 0;                 ///< threads that tokenize and pack; 0: one
  bool pin_memory = false;                 ///< page-locked batches; always so in training on a GPU
  std::optional<int64_t> prefetch_factor;  ///< steps made ahead; unset: 2
};

/// 0 where `seed` is unset, and nobody filled it in.
inline uint64_t seed_or_default(const DataSettings& settings) {
  return static_cast<uint64_t>(settings.seed.value_or(0));
}

void describe(config::Table<DataSettings>& table);
void describe(config::Table<DataloaderSettings>& table);

}  // namespace titan::data

#include "titan/data/settings.h"

namespace titan::data {

// Large enough for every cut to make progress past a damaged character.
constexpr double kSmallestPiece = 64;

void describe(config::Table<DataSettings>& table) {
  table.field("extensions", &DataSettings::extensions,
              "file name endings taken from a folder, with the dot; empty: the data set's own (cpp_headers, "
              "jsonl) or all");
  table.field("text_field", &DataSettings::text_field, "jsonl: member that holds a document's text");
  table.field("on_bad_line", &DataSettings::on_bad_line, "jsonl: what a broken line does",
              config::one_of({"stop", "skip"}));
  table.field("piece_bytes", &DataSettings::piece_bytes,
              "documents longer than this are cut into pieces that are dealt separately",
              config::at_least(kSmallestPiece));
  table.field("shuffle", &DataSettings::shuffle,
              "deal documents in a pseudo-random order, another one each epoch");
  table.field("seed", &DataSettings::seed, "seed of that order and of synthetic text; unset: debug.seed",
              config::at_least(0));
  table.field("synthetic_documents", &DataSettings::synthetic_documents,
              "documents of the data set 'synthetic'", config::at_least(1));
  table.field("cache_folder", &DataSettings::cache_folder,
              "where indexes are kept; empty: data_cache in job.dump_folder");
}

void describe(config::Table<DataloaderSettings>& table) {
  table.field("num_workers", &DataloaderSettings::num_workers, "threads that tokenize and pack ahead; 0: one",
              config::in_range(0, 256));
  table.without_effect("persistent_workers", false,
                       "keeps Python's worker processes; threads live as long as their loader anyway");
  table.field(
      "pin_memory", &DataloaderSettings::pin_memory,
      "page-locked batches, which copy to a GPU while the host goes on; training on a GPU always has them");
  table.field("prefetch_factor", &DataloaderSettings::prefetch_factor, "steps made ahead; unset: 2",
              config::in_range(1, 1024));
}

}  // namespace titan::data

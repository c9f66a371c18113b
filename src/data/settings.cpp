#include "titan/data/settings.h"

#include "data/feed/packed_feed.h"
#include "data/feed/replay_feed.h"
#include "titan/core/error.h"
#include "titan/data/feed.h"

namespace titan::data {

// Large enough that every cut makes progress past a damaged character.
constexpr double kSmallestPiece = 64;

void describe(config::Table<DataSettings>& table) {
  table.field(
      "extensions", &DataSettings::extensions,
      "extensions of the files taken from a folder, with the dot; empty: those of the data set (cpp_headers, "
      "jsonl) or all");
  table.field("text_field", &DataSettings::text_field, "jsonl: the member with a document's text");
  table.field("on_bad_line", &DataSettings::on_bad_line, "jsonl: what to do with a broken line",
              config::one_of({"stop", "skip"}));
  table.field("piece_bytes", &DataSettings::piece_bytes,
              "documents longer than this are cut into pieces that are dealt separately",
              config::at_least(kSmallestPiece));
  table.field("shuffle", &DataSettings::shuffle,
              "deal documents in a pseudo-random order, a new one each epoch");
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
                       "keeps Python's worker processes; threads live as long as their loader");
  table.field("pin_memory", &DataloaderSettings::pin_memory,
              "page-locked batches, which copy to a GPU asynchronously; training on a GPU always uses them");
  table.field("prefetch_factor", &DataloaderSettings::prefetch_factor, "steps prepared ahead; unset: 2",
              config::in_range(1, 1024));
}

std::shared_ptr<const Feed> build_feed(const FeedRequest& request) {
  if (request.dataset == "tokens")
    return std::make_shared<ReplayFeed>(request.source.path, request.model_vocab_size, !request.repeat);
  TITAN_CHECK(request.tokenizer, "data set '", request.dataset, "' needs a tokenizer");
  check_vocabulary(*request.tokenizer, request.model_vocab_size);
  const DataSettings& settings = request.source.settings;
  PackingOptions packing{.piece_bytes = settings.piece_bytes,
                         .shuffle = settings.shuffle && request.repeat,
                         .seed = seed_or_default(settings),
                         .repeat = request.repeat};
  return std::make_shared<PackedFeed>(build_source(request.dataset, request.source), request.tokenizer,
                                      packing);
}

}  // namespace titan::data

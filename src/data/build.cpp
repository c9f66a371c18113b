#include "titan/data/build.h"

#include "titan/core/error.h"
#include "titan/data/packed_feed.h"
#include "titan/data/replay_feed.h"

namespace titan::data {

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

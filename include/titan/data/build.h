#pragma once

// From a config's words to a feed.

#include "titan/data/feed.h"
#include "titan/data/source.h"
#include "titan/data/tokenizer.h"

namespace titan::data {

struct FeedRequest {
  std::string dataset;   ///< training.dataset: "tokens" for recorded batches, or a kind of source
  SourceRequest source;  ///< training.dataset_path, [data], where to keep indexes
  std::shared_ptr<const Tokenizer> tokenizer;  ///< may be null for recorded batches
  int64_t model_vocab_size = 0;
  bool repeat = true;  ///< false: one pass (validation)
};

/// Throws ConfigError as build_source, check_vocabulary and ReplayFeed do.
std::shared_ptr<const Feed> build_feed(const FeedRequest& request);

}  // namespace titan::data

#pragma once

// Global batches, row by row.
//
//   lane    one row of every global batch: a finite or endless sequence of samples, whose state is three
//           numbers. There are `global_batch_size` lanes on any number of ranks; data-parallel rank r of N
//           owns lanes r, r + N, r + 2N, ...
//   sample  seq_len inputs and, for each, the next token as label. Label -100 doesn't count.
//   feed    the source of all lanes: packed documents, or recorded batches
//
//   auto feed = build_feed({.dataset = "text",
//                           .source = {.path = "books/"},
//                           .tokenizer = build_tokenizer("bytes"),
//                           .model_vocab_size = 258});

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "titan/data/source.h"
#include "titan/data/tokenizer.h"

namespace titan::data {

constexpr int64_t kIgnoredLabel = -100;

/// A lane's position. With the feed's fingerprint and the number of lanes, it determines all later samples.
struct LaneState {
  int64_t lane = 0;
  int64_t epoch = 0;
  int64_t position = 0;      ///< the current piece in the epoch; for recorded batches, the step
  int64_t token_offset = 0;  ///< number of the piece's tokens that have been used
  friend bool operator==(const LaneState&, const LaneState&) = default;
};

/// Where a sample is written; both have the length of the sequence.
struct Row {
  std::span<int64_t> input;
  std::span<int64_t> labels;
};

/// Not thread-safe. Keeps its feed alive.
class Lane {
 public:
  virtual ~Lane() = default;

  /// Writes the next sample and returns how many of its labels count. When a finite feed has nothing left for
  /// this lane, the row is input 0 and label -100. Throws Error if the feed can't be read.
  virtual int64_t fill(Row row) = 0;

  /// The state after the last fill(). A lane opened with it continues there.
  virtual LaneState state() const = 0;
};

/// The contents of a feed, estimated from a few samples.
struct FeedSize {
  int64_t documents = 0;  ///< 0: recorded batches
  int64_t bytes = 0;      ///< the text's; 0: token ids
  int64_t tokens = 0;     ///< in one epoch; 0: unknown
  bool is_exact = false;  ///< the tokens are counted, not estimated
  double invalid = 0;     ///< share of the sampled bytes that isn't valid UTF-8
};

/// Immutable and thread-safe.
class Feed : public std::enable_shared_from_this<Feed> {
 public:
  virtual ~Feed() = default;

  /// Throws ConfigError if the feed can't give batches of this shape.
  virtual void check_shape(int64_t num_lanes, int64_t seq_len) const = 0;

  /// The state of lane `lane` of `num_lanes` before its first sample.
  virtual LaneState start(int64_t lane, int64_t num_lanes) const = 0;
  virtual std::unique_ptr<Lane> open(const LaneState& state, int64_t num_lanes) const = 0;

  /// States for `num_lanes` lanes that continue after `lanes`, a complete set of a different size.
  virtual std::vector<LaneState> redeal(const std::vector<LaneState>& lanes, int64_t num_lanes) const = 0;

  /// The number of steps from the start, if it is known without reading. Not set for an endless feed, nor for
  /// one that ends with the first step in which no lane of any rank has a label.
  virtual std::optional<int64_t> num_steps() const { return std::nullopt; }

  /// Reads samples of at most some hundred kilobytes.
  virtual FeedSize measure() const { return {}; }

  /// Differs between feeds whose lanes may differ. Written as "source = ...; order = ...", it lets an error
  /// name the part that has changed; names contain no "=" or ";".
  virtual std::string fingerprint() const = 0;
};

struct FeedRequest {
  std::string dataset;  ///< training.dataset: a kind of source, or "tokens" for stored ids
  SourceRequest source;
  std::shared_ptr<const Tokenizer> tokenizer;  ///< not needed for stored ids
  int64_t model_vocab_size = 0;
  bool repeat = true;  ///< false: one pass (validation)
};

/// Throws ConfigError as build_source, check_vocabulary and ReplayFeed do.
std::shared_ptr<const Feed> build_feed(const FeedRequest& request);

}  // namespace titan::data

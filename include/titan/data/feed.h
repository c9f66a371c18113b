#pragma once

// What a global batch is made of.
//
//   lane    one row of every global batch: an endless (or finite) sequence of samples with a state of three
//   numbers. There are
//           `global_batch_size` of them, whatever the number of ranks; data-parallel rank r of N owns lanes
//           r, r + N, r + 2N ...
//   sample  seq_len inputs and, for each, the label: the token that follows. Label -100 doesn't count.
//   feed    what lanes read: documents packed one after another (packed_feed.h), or recorded batches
//   (replay_feed.h)

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

/// Where a lane stands. With the feed's fingerprint and the number of lanes it determines all that comes.
struct LaneState {
  int64_t lane = 0;
  int64_t epoch = 0;
  int64_t position = 0;      ///< of the current piece (of the step, for recorded batches) within the epoch
  int64_t token_offset = 0;  ///< tokens of the piece that are used up
  friend bool operator==(const LaneState&, const LaneState&) = default;
};

/// Where a sample is written: both of the sequence's length.
struct Row {
  std::span<int64_t> input;
  std::span<int64_t> labels;
};

/// Used by one thread at a time. Keeps its feed alive.
class Lane {
 public:
  virtual ~Lane() = default;

  /// Writes the next sample and returns how many of its labels count. Once a finite feed has nothing left for
  /// this lane, rows are input 0 and label -100 throughout. Throws Error when the feed can't be read.
  virtual int64_t fill(Row row) = 0;

  /// The state after the last fill; opening a lane with it continues there.
  virtual LaneState state() const = 0;
};

/// Immutable and thread-safe.
class Feed : public std::enable_shared_from_this<Feed> {
 public:
  virtual ~Feed() = default;

  /// Throws ConfigError when the feed can't be dealt to batches of this shape.
  virtual void check_shape(int64_t num_lanes, int64_t seq_len) const = 0;

  /// Lane `lane` of `num_lanes` before its first sample.
  virtual LaneState start(int64_t lane, int64_t num_lanes) const = 0;
  virtual std::unique_ptr<Lane> open(const LaneState& state, int64_t num_lanes) const = 0;

  /// States for `num_lanes` lanes that continue where `lanes`, a complete set of another number, stand.
  virtual std::vector<LaneState> redeal(const std::vector<LaneState>& lanes, int64_t num_lanes) const = 0;

  /// How many steps a feed has from its start, where that is known without reading it. None for an endless
  /// one, and for one that runs dry: it ends with the first step in which no lane of any rank has a label.
  virtual std::optional<int64_t> num_steps() const { return std::nullopt; }

  /// Differs between feeds whose lanes could differ.
  virtual std::string fingerprint() const = 0;
};

// From a config's words to a feed.

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

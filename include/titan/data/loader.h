#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/data/feed.h"
#include "titan/data/settings.h"

namespace titan::data {

/// What a loader needs to continue: a table with a row a lane, which any number of ranks can share out.
struct LoaderState {
  int64_t steps = 0;             ///< global batches given so far
  int64_t num_lanes = 0;         ///< global batch size
  std::string feed_fingerprint;  ///< of what was read
  std::vector<LaneState> lanes;  ///< of one rank after DataLoader::state, of all after merge; by lane
  friend bool operator==(const LoaderState&, const LoaderState&) = default;
};

/// The tables of all ranks as one. Throws Error when they are of different steps or feeds, or a lane is
/// missing or there twice.
LoaderState merge(const std::vector<LoaderState>& parts);

std::string to_json(const LoaderState& state);
/// Throws Error when the text isn't what to_json writes.
LoaderState loader_state_from_json(std::string_view text);

// Batches for one data-parallel rank.
//
// A step's global batch is one sample from every lane of the feed. Rank r of N gives the rows of lanes r, r +
// N, r + 2N ... in this order, cut into micro-batches of `local_batch_size` rows; all ranks have the same
// number of micro-batches, and rows beyond a rank's lanes have input 0 and label -100. So the set of a step's
// rows is the same for any N and any cut. Threads fill the coming steps while the current one is computed.

struct LoaderOptions {
  int64_t dp_rank = 0;
  int64_t dp_size = 1;
  int64_t global_batch_size = -1;  ///< lanes; -1: local_batch_size x dp_size
  int64_t local_batch_size = 1;    ///< rows of a micro-batch
  int64_t seq_len = 0;
  DataloaderSettings settings;
};

/// One micro-batch on the host, contiguous. Stays valid as long as it is held; nobody else writes to it.
struct Batch {
  at::Tensor input_BS;       ///< int64
  at::Tensor labels_BS;      ///< int64; -100 doesn't count
  int64_t valid_tokens = 0;  ///< labels that count
};

/// Used by one thread.
class DataLoader {
 public:
  /// Throws ConfigError when the feed doesn't have batches of this shape. Reads nothing yet.
  DataLoader(std::shared_ptr<const Feed> feed, const LoaderOptions& options);
  /// Stops the threads; waits for the piece that each is at.
  ~DataLoader();
  DataLoader(DataLoader&&) noexcept;

  /// All micro-batches of the next step; nothing behind the last one of a feed that knows its length
  /// (num_steps). A finite feed that doesn't runs dry instead: its batches have no labels any more on a rank
  /// that is through, and it is at its end when no rank's have. What goes wrong while a step is made (an
  /// unreadable file) is thrown when that step is asked for, and again at every further call.
  std::optional<std::vector<Batch>> next_step();

  /// The next micro-batch; as next_step, one at a time.
  std::optional<Batch> next();

  /// Waits as long for the next step; whether next_step() and next() would return (or throw) at once.
  bool wait(std::chrono::milliseconds longest);

  /// The last step given counts as not given: state() is the one before it, and the next step is that one
  /// again. Once a step.
  void take_back_step();

  /// Nobody waits for the threads any more, which may be at a read that never returns: not the destructor,
  /// nor a later step, which starts others.
  void abandon_reading();

  int64_t num_micro_batches() const;
  int64_t num_lanes() const;
  /// Of this rank in a step, without those that fill up its micro-batches.
  int64_t num_rows() const;
  /// Feed::num_steps
  std::optional<int64_t> num_steps() const;

  /// This rank's lanes after the last step given, whatever has been made ahead. Throws Error between a step's
  /// micro-batches.
  LoaderState state() const;

  /// Continues where `state`, of all lanes (merge), stands; on any number of ranks and with any sequence
  /// length. With another global batch size the feed deals anew (Feed::redeal). Throws Error, naming both
  /// fingerprints, when it is of other data.
  void load_state(const LoaderState& state);

  /// Goes back to the feed's start (validation goes over the same set each time).
  void restart();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace titan::data

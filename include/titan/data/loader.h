#pragma once

// Batches for one data-parallel rank.
//
//   DataLoader loader(build_feed(request), {.local_batch_size = 8, .seq_len = 2048});
//   while (auto step = loader.next_step())
//     for (const Batch& batch : *step) ...
//
// A step's global batch is one sample from every lane of the feed (feed.h). Rank r of N gives the rows of
// lanes r, r + N, r + 2N, ... in this order, cut into micro-batches of `local_batch_size` rows. All ranks
// have the same number of micro-batches; rows beyond a rank's lanes have input 0 and label -100. So the rows
// of a step are the same for any N and any micro-batch size. Threads prepare the next steps while the current
// one is computed.

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/config/table.h"
#include "titan/data/feed.h"

namespace titan::data {

/// [training.dataloader], [validation.dataloader]: when batches are prepared; doesn't change their contents.
struct DataloaderSettings {
  int64_t num_workers = 0;                 ///< threads that tokenize and pack; 0: one
  bool pin_memory = false;                 ///< page-locked batches; always used when training on a GPU
  std::optional<int64_t> prefetch_factor;  ///< steps prepared ahead; unset: 2
};
void describe(config::Table<DataloaderSettings>& table);

/// A position from which a loader continues: one row per lane, which any number of ranks can share.
struct LoaderState {
  int64_t steps = 0;      ///< global batches given so far
  int64_t num_lanes = 0;  ///< global batch size
  std::string feed_fingerprint;
  std::vector<LaneState> lanes;  ///< sorted; from DataLoader::state() one rank's, from merge() all
  friend bool operator==(const LoaderState&, const LoaderState&) = default;
};

/// Joins the states of all ranks. Throws Error if they differ in step or feed, or a lane is missing or
/// duplicate.
LoaderState merge(const std::vector<LoaderState>& parts);

std::string to_json(const LoaderState& state);
/// Throws Error if the text isn't what to_json writes.
LoaderState loader_state_from_json(std::string_view text);

struct LoaderOptions {
  int64_t dp_rank = 0;
  int64_t dp_size = 1;
  int64_t global_batch_size = -1;  ///< lanes; -1: local_batch_size x dp_size
  int64_t local_batch_size = 1;    ///< rows of a micro-batch
  int64_t seq_len = 0;
  DataloaderSettings settings;
  std::optional<int64_t> document_end = std::nullopt;  ///< passed on with each batch
};

/// One micro-batch in contiguous host memory, which isn't reused while the batch is held.
struct Batch {
  at::Tensor input_BS;       ///< int64
  at::Tensor labels_BS;      ///< int64; -100 doesn't count
  int64_t valid_tokens = 0;  ///< labels that count
  /// The last token of each document, if attention has to stay within documents (ops::documents_ending_with).
  std::optional<int64_t> document_end = std::nullopt;
};

class Prefetcher;

/// Not thread-safe.
class DataLoader {
 public:
  /// Throws ConfigError if the feed can't be cut into batches of this shape. Reads nothing yet.
  DataLoader(std::shared_ptr<const Feed> feed, const LoaderOptions& options);
  /// Stops the threads, each after the piece it is reading.
  ~DataLoader();
  DataLoader(DataLoader&&) noexcept;

  /// All micro-batches of the next step, or nothing after the last step of a feed that knows its length
  /// (num_steps). Another finite feed ends differently: a rank that has used its lanes gets batches without
  /// labels, and the data end at the first step without labels on any rank. An error while a step is prepared
  /// (an unreadable file) is thrown when that step is requested, and at every later call.
  std::optional<std::vector<Batch>> next_step();

  /// The next micro-batch, like next_step().
  std::optional<Batch> next();

  /// Waits up to `longest` for the next step. Returns whether next_step() and next() would return (or throw)
  /// at once.
  bool wait(std::chrono::milliseconds longest);

  /// Undoes the last next_step(): state() is the one before it, and the next step is the same again. Possible
  /// once per step.
  void take_back_step();

  /// Abandons the threads, which may be stuck in a read: neither the destructor nor a later step, which
  /// starts new ones, waits for them.
  void abandon_reading();

  int64_t num_micro_batches() const;
  int64_t num_lanes() const { return options_.global_batch_size; }
  /// This rank's rows of a step, without padding.
  int64_t num_rows() const { return static_cast<int64_t>(lanes_.size()); }
  const Feed& feed() const { return *feed_; }
  /// As Feed::num_steps.
  std::optional<int64_t> num_steps() const { return num_steps_; }

  /// This rank's lanes after the last step returned, whatever is prefetched. Throws Error between the
  /// micro-batches of a step.
  LoaderState state() const;

  /// Continues from the state of all lanes (merge), on any number of ranks and with any sequence length. For
  /// another global batch size, the feed deals again (Feed::redeal). Throws Error if the state belongs to
  /// other data, with both fingerprints.
  void load_state(const LoaderState& state);

  /// Throws as load_state does, and changes nothing.
  void check_state(const LoaderState& state) const { lanes_after(state); }

  /// Goes back to the feed's start. Validation reads the same set each time.
  void restart();

 private:
  bool is_at_end() const { return num_steps_ && steps_ >= *num_steps_; }
  std::vector<LaneState> lanes_after(const LoaderState& state) const;
  void begin_at(int64_t steps, const std::vector<LaneState>& all);
  Prefetcher& prefetcher();
  std::optional<std::vector<Batch>> make_step();

  std::shared_ptr<const Feed> feed_;
  LoaderOptions options_;
  int64_t steps_ = 0;
  std::optional<int64_t> num_steps_;
  std::vector<LaneState> lanes_;                        // this rank's, after the last step returned
  std::optional<std::vector<LaneState>> lanes_before_;  // before that step
  std::vector<Batch> current_;                          // the step that next() is in
  size_t next_micro_batch_ = 0;
  std::unique_ptr<Prefetcher> prefetcher_;
};

}  // namespace titan::data

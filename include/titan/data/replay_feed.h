#pragma once

#include "titan/data/feed.h"
#include "titan/data/npy.h"

namespace titan::data {

/// Recorded batches: a folder with `input.npy` and `labels.npy`, int32 [steps, global batch, sequence]. Row =
/// lane, so that another framework's run can be repeated exactly. An epoch is a step; nothing is shuffled or
/// repeated.
class ReplayFeed : public Feed {
 public:
  /// `vocab_size`: ids must lie below it. `finite`: past the last step rows don't count; otherwise asking for
  /// them is an error.
  ReplayFeed(const std::filesystem::path& folder, int64_t vocab_size, bool finite);

  /// Throws ConfigError unless `num_lanes` and `seq_len` are the recording's.
  void check_shape(int64_t num_lanes, int64_t seq_len) const override;
  LaneState start(int64_t lane, int64_t num_lanes) const override;
  std::unique_ptr<Lane> open(const LaneState& state, int64_t num_lanes) const override;
  /// Throws ConfigError: a recording has one batch size.
  std::vector<LaneState> redeal(const std::vector<LaneState>& lanes, int64_t num_lanes) const override;
  /// Known from the files.
  std::optional<int64_t> num_steps() const override;
  std::string fingerprint() const override { return fingerprint_; }

  /// Row `lane` of `step` with labels that count; throws Error past the end of a recording that isn't finite.
  int64_t read(int64_t step, int64_t lane, Row row) const;

 private:
  NpyArray input_;
  NpyArray labels_;
  int64_t vocab_size_;
  bool finite_;
  std::string fingerprint_;
};

}  // namespace titan::data

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "titan/core/file.h"
#include "titan/data/feed.h"

namespace titan::data {

struct NpyHeader {
  std::array<int64_t, 3> shape{};
  size_t data_start = 0;  ///< offset of the first element
};

/// `file` is the whole .npy file. Throws ConfigError with `path` unless it is a C-ordered array of int32, of
/// three dimensions whose sizes are exactly the file's.
NpyHeader parse_npy_header(std::string_view file, const std::string& path);

// NumPy's .npy files, versions 1 to 3, of little-endian int32.

/// A three-dimensional int32 array in a file mapped for its life. Immutable and thread-safe.
class NpyArray {
 public:
  /// Throws ConfigError with the path when it isn't a C-ordered int32 array of three dimensions whose sizes
  /// are exactly the file's.
  explicit NpyArray(const std::filesystem::path& path);

  const std::array<int64_t, 3>& shape() const { return shape_; }

  /// Copies element [i, j, :] to `row`, which has shape()[2] places.
  void read_row(int64_t i, int64_t j, std::span<int64_t> row) const;

  const std::filesystem::path& path() const { return path_; }
  std::string_view bytes() const { return file_.text(); }

 private:
  std::filesystem::path path_;
  MappedFile file_;
  size_t data_ = 0;  // offset of the first element
  std::array<int64_t, 3> shape_{};
};

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

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "core/file.h"
#include "titan/data/feed.h"

namespace titan::data {

struct NpyHeader {
  std::array<int64_t, 3> shape{};
  size_t data_start = 0;  ///< offset of the first element
};

/// `file` is the whole .npy file. Throws ConfigError with `path` unless it is a C-ordered int32 array of
/// three dimensions that fills the file exactly.
NpyHeader parse_npy_header(std::string_view file, const std::string& path);

// NumPy's .npy files, versions 1 to 3, of little-endian int32.

/// A three-dimensional int32 array in a mapped file. Immutable and thread-safe.
class NpyArray {
 public:
  /// Throws ConfigError like parse_npy_header.
  explicit NpyArray(const std::filesystem::path& path);

  const std::array<int64_t, 3>& shape() const { return shape_; }

  /// Copies element [i, j, :] to `row`, whose length is shape()[2].
  void read_row(int64_t i, int64_t j, std::span<int64_t> row) const;

  const std::filesystem::path& path() const { return path_; }
  std::string_view bytes() const { return file_.text(); }

 private:
  std::filesystem::path path_;
  MappedFile file_;
  size_t data_ = 0;  // offset of the first element
  std::array<int64_t, 3> shape_{};
};

/// Recorded batches, to repeat another framework's run exactly: a folder with `input.npy` and `labels.npy`,
/// int32 [steps, global batch, sequence]. Each row is a lane; nothing is shuffled or repeated.
class ReplayFeed : public Feed {
 public:
  /// Ids must be below `vocab_size`. After the last step, rows don't count if `finite`; otherwise reading
  /// them is an Error.
  ReplayFeed(const std::filesystem::path& folder, int64_t vocab_size, bool finite);

  /// Throws ConfigError unless `num_lanes` and `seq_len` are the recording's.
  void check_shape(int64_t num_lanes, int64_t seq_len) const override;
  LaneState start(int64_t lane, int64_t num_lanes) const override;
  std::unique_ptr<Lane> open(const LaneState& state, int64_t num_lanes) const override;
  /// Throws ConfigError: a recording has one batch size.
  std::vector<LaneState> redeal(const std::vector<LaneState>& lanes, int64_t num_lanes) const override;
  std::optional<int64_t> num_steps() const override;
  std::string fingerprint() const override { return fingerprint_; }

  /// Reads row `lane` of `step` and returns how many labels count.
  int64_t read(int64_t step, int64_t lane, Row row) const;

 private:
  NpyArray input_;
  NpyArray labels_;
  int64_t vocab_size_;
  bool finite_;
  std::string fingerprint_;
};

}  // namespace titan::data

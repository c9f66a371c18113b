#pragma once

// NumPy's .npy files, versions 1 to 3, of little-endian int32.

#include <array>
#include <filesystem>

#include "titan/core/file.h"

namespace titan::data {

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

}  // namespace titan::data

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace titan::data {

struct NpyHeader {
  std::array<int64_t, 3> shape{};
  size_t data_start = 0;  ///< offset of the first element
};

/// `file` is the whole .npy file. Throws ConfigError with `path` unless it is a C-ordered array of int32, of
/// three dimensions whose sizes are exactly the file's.
NpyHeader parse_npy_header(std::string_view file, const std::string& path);

}  // namespace titan::data

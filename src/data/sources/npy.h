#pragma once

// The header of NumPy's .npy files, versions 1 to 3.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace titan::data {

constexpr std::string_view kNpyMagic = "\x93NUMPY";
/// Bytes of a file that hold the header of any array of few dimensions.
constexpr int64_t kMostNpyHeaderBytes = 64 << 10;

struct NpyHeader {
  std::array<int64_t, 3> shape{};
  size_t data_start = 0;  ///< offset of the first element
};

/// `file` is the whole .npy file. Throws ConfigError with `path` unless it is a C-ordered array of three
/// dimensions, of little-endian int32, that fills the file exactly.
NpyHeader parse_npy_header(std::string_view file, const std::string& path);

/// A row of token ids.
struct NpyRow {
  int64_t size = 0;   ///< elements
  int64_t width = 0;  ///< bytes of an element
  int64_t data_start = 0;
};

/// `begin` is the beginning of a file of `file_bytes` bytes. Throws ConfigError with `path` unless it is an
/// array of one dimension, of little-endian uint16, uint32 or int32, that fills the file exactly.
NpyRow parse_npy_row(std::string_view begin, int64_t file_bytes, const std::string& path);

}  // namespace titan::data

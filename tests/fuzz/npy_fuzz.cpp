// Parses the header of a .npy file.

#include "data/feed/feeds.h"

#include "fuzz.h"

namespace titan::fuzz {
namespace {

constexpr const char* kFile = "strange.npy";

}  // namespace

void fuzz_input(std::string_view file) {
  data::NpyRow row;
  const auto size = static_cast<int64_t>(file.size());
  if (accepted(kFile, [&] { row = data::parse_npy_row(file, size, kFile); }))
    require(row.size >= 0 && row.data_start + row.size * row.width == size, "the row ends with the file");
  data::NpyHeader header;
  if (!accepted(kFile, [&] { header = data::parse_npy_header(file, kFile); })) return;
  require(header.data_start <= file.size(), "the elements begin in the file");
  int64_t bytes = sizeof(int32_t);
  for (int64_t size : header.shape)
    require(size >= 0 && !__builtin_mul_overflow(bytes, size, &bytes),
            "the product of the sizes fits 64 bits");
  require(header.data_start + static_cast<size_t>(bytes) == file.size(), "the elements end with the file");
}

}  // namespace titan::fuzz

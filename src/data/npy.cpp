#include "titan/data/npy.h"

#include <cstring>

#include "npy_header.h"

namespace titan::data {

NpyArray::NpyArray(const std::filesystem::path& path) : path_(path), file_(path) {
  NpyHeader header = parse_npy_header(file_.text(), path.string());
  data_ = header.data_start;
  shape_ = header.shape;
}

void NpyArray::read_row(int64_t i, int64_t j, std::span<int64_t> row) const {
  size_t first = static_cast<size_t>(i * shape_[1] + j) * shape_[2];
  const char* at = file_.text().data() + data_ + first * sizeof(int32_t);
  for (int64_t& value : row) {
    int32_t element;  // a header's length needn't keep the elements aligned
    std::memcpy(&element, at, sizeof element);
    value = element;
    at += sizeof element;
  }
}

}  // namespace titan::data

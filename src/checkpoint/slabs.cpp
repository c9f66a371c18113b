#include "slabs.h"

#include <algorithm>

namespace titan::checkpoint {

std::vector<Box> slabs_of(const std::vector<int64_t>& shape, int64_t element_size, int64_t most_bytes) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return {};
  if (shape.empty()) return {Box{}};
  // The dimension that is cut: of it several indices fit, of the one before not a single one.
  int64_t index_bytes = element_size;
  for (int64_t length : shape) index_bytes *= length;
  size_t cut = 0;
  for (;; ++cut) {
    index_bytes /= shape[cut];
    if (index_bytes <= most_bytes || cut + 1 == shape.size()) break;
  }
  const int64_t step = std::max<int64_t>(1, most_bytes / index_bytes);
  std::vector<Box> slabs;
  std::vector<int64_t> offset(shape.size(), 0);
  while (true) {
    std::vector<int64_t> length = shape;
    std::fill(length.begin(), length.begin() + static_cast<std::ptrdiff_t>(cut), 1);
    length[cut] = std::min(step, shape[cut] - offset[cut]);
    slabs.push_back({offset, length});
    offset[cut] += length[cut];
    for (size_t dim = cut; offset[dim] == shape[dim]; --dim) {  // carry
      if (dim == 0) return slabs;
      offset[dim] = 0;
      ++offset[dim - 1];
    }
  }
}

}  // namespace titan::checkpoint

#include "titan/tensor/placement.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <ostream>

#include "titan/core/error.h"

namespace titan {

std::ostream& operator<<(std::ostream& out, const Placement& placement) {
  switch (placement.kind) {
    case Placement::Kind::Shard:
      return out << "Shard(" << placement.dim << ")";
    case Placement::Kind::Replicate:
      return out << "Replicate";
    case Placement::Kind::Partial:
      return out << "Partial";
  }
  return out;
}

int64_t padded_chunk_length(int64_t size, int64_t parts) {
  TITAN_CHECK(size >= 0 && parts > 0, "can't split a size of ", size, " in ", parts, " parts");
  return (size + parts - 1) / parts;
}

Chunk chunk_of(int64_t size, int64_t parts, int64_t index) {
  TITAN_CHECK(index >= 0 && index < parts, "no part ", index, " of ", parts);
  int64_t length = padded_chunk_length(size, parts);
  int64_t offset = std::min(index * length, size);
  return {offset, std::min(length, size - offset)};
}

int64_t Box::numel() const {
  return std::accumulate(length.begin(), length.end(), int64_t{1}, std::multiplies<>());
}

}  // namespace titan

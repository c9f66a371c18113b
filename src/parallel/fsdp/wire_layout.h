#pragma once

#include <cstdint>
#include <vector>

#include <c10/core/ScalarType.h>

#include "parallel/fsdp/shard_layout.h"

namespace titan::fsdp {

/// Where parameters lie while they travel and when they are gathered: as in the shards, but each in the dtype
/// that it travels in. Where these differ, lengths count bytes, else elements.
class WireLayout {
 public:
  WireLayout() = default;
  WireLayout(const ShardLayout& shards, const std::vector<at::ScalarType>& dtypes);

  at::ScalarType dtype() const { return dtype_; }  ///< of the buffers: kByte where some are of a byte
  int64_t offset(size_t slot) const { return offsets_[slot]; }   ///< of its chunk in a rank's part
  int64_t chunk(size_t slot) const { return chunks_[slot]; }     ///< length of its chunk
  int64_t end(size_t slot) const { return offsets_[slot + 1]; }  ///< of its chunk and the alignment behind it
  int64_t part() const { return offsets_.back(); }               ///< length of a rank's part

 private:
  at::ScalarType dtype_ = at::kFloat;
  std::vector<int64_t> offsets_{0}, chunks_;
};

}  // namespace titan::fsdp

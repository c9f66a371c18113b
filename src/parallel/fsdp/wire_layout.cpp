#include "parallel/fsdp/wire_layout.h"

#include <algorithm>

namespace titan::fsdp {

// Chunks start at multiples of 16 elements, so those of a byte each at multiples of 16 bytes.
WireLayout::WireLayout(const ShardLayout& shards, const std::vector<at::ScalarType>& dtypes) {
  const bool uniform =
      std::all_of(dtypes.begin(), dtypes.end(), [&](auto dtype) { return dtype == dtypes[0]; });
  // Not every backend knows 8-bit floating-point numbers.
  dtype_ = uniform && c10::elementSize(dtypes[0]) > 1 ? dtypes[0] : at::kByte;
  const auto& slots = shards.slots();
  for (size_t i = 0; i < slots.size(); ++i) {
    const int64_t next = i + 1 < slots.size() ? slots[i + 1].offset : shards.shard_numel();
    const int64_t width = uniform ? 1 : static_cast<int64_t>(c10::elementSize(dtypes[i]));
    chunks_.push_back(slots[i].chunk_numel() * width);
    offsets_.push_back(offsets_.back() + (next - slots[i].offset) * width);
  }
}

}  // namespace titan::fsdp

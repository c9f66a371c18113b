#include "parallel/fsdp/shard_layout.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace titan::fsdp {

namespace {

// Slots start at multiples of 16 elements (32 bytes in bf16) so that vector loads and tensor cores see
// aligned rows; for the sizes of real layers that adds nothing, and the gathered parts of a fused product
// stay adjacent.
constexpr int64_t kAlignment = 16;

int64_t aligned(int64_t numel) { return (numel + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

ShardLayout::ShardLayout(const std::vector<std::vector<int64_t>>& shapes, size_t num_trainable, int num_ranks)
    : num_ranks_(num_ranks) {
  int64_t used = 0;
  for (size_t i = 0; i < shapes.size(); ++i) {
    Slot slot;
    slot.shape = shapes[i];
    slot.row_numel =
        std::accumulate(slot.shape.begin() + 1, slot.shape.end(), int64_t{1}, std::multiplies<>());
    slot.chunk_rows = padded_chunk_length(slot.rows(), num_ranks);
    slot.offset = shard_numel_;
    slot.trainable = i < num_trainable;
    shard_numel_ += aligned(slot.chunk_numel());
    if (slot.trainable) trainable_numel_ = shard_numel_;
    used += slot.rows() * slot.row_numel;
    slots_.push_back(std::move(slot));
  }
  has_padding_ = used != shard_numel_ * num_ranks;
}

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

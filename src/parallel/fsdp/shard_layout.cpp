#include "parallel/fsdp/shard_layout.h"

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

}  // namespace titan::fsdp

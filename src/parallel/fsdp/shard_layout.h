#pragma once

// [Note: FSDP tensors]
// A group of P parameters over N ranks has
//   compute parameter   in the modules: full shape, param_dtype; has memory only while gathered
//   flat shard  [S]     this rank's chunks of all parameters in a row; the optimizer's memory
//   shard (leaf)        one parameter's part of the flat shard, as titan::parameters() returns it
//   full buffer [N*S]   the gathered parameters: p has the region [N*offset_p, N*(offset_p + chunk_p))
//   packed      [N, S]  the data of a collective: row r is rank r's flat shard (or the gradient for it). Where the
//                       backend takes several collectives in one call (NCCL), parameters have calls of their own, from
//                       and to the full buffer, and nothing is packed, except with cpu_offload and for the second
//                       gather of ReshardAfterForward::to_size
// Each parameter is cut along dim 0 by torch.chunk's rule into chunks of ceil(rows/N) rows. A shorter chunk
// is padded in the flat shard, so that S is the same on every rank. Trainable parameters come first:
// gradients use the prefix S_trainable.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include <c10/core/ScalarType.h>

#include "titan/tensor/placement.h"

namespace titan::fsdp {

/// The place of one parameter. Offsets and counts are in elements.
struct Slot {
  std::vector<int64_t> shape;  ///< shape of the whole parameter
  int64_t row_numel = 1;       ///< elements in one row (product of the dims after the first)
  int64_t chunk_rows = 0;      ///< rows in a full chunk
  int64_t offset = 0;          ///< where the chunk begins in the flat shard
  bool trainable = true;

  int64_t rows() const { return shape[0]; }
  int64_t chunk_numel() const { return chunk_rows * row_numel; }
};

class ShardLayout {
 public:
  /// Slots start at multiples of this many elements (32 bytes in bf16) so that vector loads and tensor cores
  /// see aligned rows. Real layers' sizes are multiples already, so the gathered parts of a fused product
  /// stay adjacent.
  static constexpr int64_t kAlignment = 16;

  /// `shapes` are in slot order, the `num_trainable` trainable ones first; all have at least one dim.
  ShardLayout(const std::vector<std::vector<int64_t>>& shapes, size_t num_trainable, int num_ranks)
      : num_trainable_(num_trainable), num_ranks_(num_ranks) {
    int64_t used = 0;
    for (size_t i = 0; i < shapes.size(); ++i) {
      Slot slot;
      slot.shape = shapes[i];
      slot.row_numel =
          std::accumulate(slot.shape.begin() + 1, slot.shape.end(), int64_t{1}, std::multiplies<>());
      slot.chunk_rows = padded_chunk_length(slot.rows(), num_ranks);
      slot.offset = shard_numel_;
      slot.trainable = i < num_trainable;
      shard_numel_ += (slot.chunk_numel() + kAlignment - 1) / kAlignment * kAlignment;
      if (slot.trainable) trainable_numel_ = shard_numel_;
      used += slot.rows() * slot.row_numel;
      slots_.push_back(std::move(slot));
    }
    has_padding_ = used != shard_numel_ * num_ranks;
  }

  const std::vector<Slot>& slots() const { return slots_; }
  size_t num_trainable() const { return num_trainable_; }
  int num_ranks() const { return num_ranks_; }
  int64_t shard_numel() const { return shard_numel_; }          ///< S
  int64_t trainable_numel() const { return trainable_numel_; }  ///< S_trainable
  /// Whether some elements of the packed form belong to no parameter.
  bool has_padding() const { return has_padding_; }
  /// The rows of parameter `slot` that rank `rank` owns.
  Chunk rows_of(size_t slot, int rank) const { return chunk_of(slots_[slot].rows(), num_ranks_, rank); }

 private:
  std::vector<Slot> slots_;
  size_t num_trainable_;
  int num_ranks_;
  int64_t shard_numel_ = 0;
  int64_t trainable_numel_ = 0;
  bool has_padding_ = false;
};

/// The places of parameters in a gather's input and result: as in the shards, but each parameter in the dtype
/// that it is sent in. If these dtypes differ, lengths count bytes, else elements.
class WireLayout {
 public:
  WireLayout() = default;
  // Chunks start at multiples of 16 elements, so even chunks of one-byte elements are aligned to 16 bytes.
  WireLayout(const ShardLayout& shards, const std::vector<at::ScalarType>& dtypes) {
    const bool uniform =
        std::all_of(dtypes.begin(), dtypes.end(), [&](auto dtype) { return dtype == dtypes[0]; });
    // Not every backend supports 8-bit floating-point numbers.
    dtype_ = uniform && c10::elementSize(dtypes[0]) > 1 ? dtypes[0] : at::kByte;
    const auto& slots = shards.slots();
    for (size_t i = 0; i < slots.size(); ++i) {
      const int64_t next = i + 1 < slots.size() ? slots[i + 1].offset : shards.shard_numel();
      const int64_t width = uniform ? 1 : static_cast<int64_t>(c10::elementSize(dtypes[i]));
      chunks_.push_back(slots[i].chunk_numel() * width);
      offsets_.push_back(offsets_.back() + (next - slots[i].offset) * width);
    }
  }

  /// The buffers' dtype; kByte if some parameters have one-byte elements.
  at::ScalarType dtype() const { return dtype_; }
  int64_t offset(size_t slot) const { return offsets_[slot]; }   ///< start of the slot's chunk in a part
  int64_t chunk(size_t slot) const { return chunks_[slot]; }     ///< length of the slot's chunk
  int64_t end(size_t slot) const { return offsets_[slot + 1]; }  ///< end of the slot's chunk and its padding
  int64_t part() const { return offsets_.back(); }               ///< length of a rank's part

 private:
  at::ScalarType dtype_ = at::kFloat;
  std::vector<int64_t> offsets_{0}, chunks_;
};

}  // namespace titan::fsdp

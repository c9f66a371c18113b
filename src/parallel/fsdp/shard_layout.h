#pragma once

// [Note: FSDP tensors]
// A group of P parameters over N ranks has
//   compute parameter   in the modules: full shape, param_dtype; has memory only while gathered
//   flat shard  [S]     this rank's chunks of all parameters in a row; the optimizer's memory
//   shard (leaf)        one parameter's part of the flat shard, as titan::parameters() returns it
//   full buffer [N*S]   the gathered parameters: p has the region [N*offset_p, N*(offset_p + chunk_p))
//   packed      [N, S]  the data of a collective: row r is rank r's flat shard (or the gradient for it)
// Each parameter is cut along dim 0 by torch.chunk's rule into chunks of ceil(rows/N) rows; a chunk that is
// shorter is padded in the flat shard, so that every rank's S is equal. Trainable parameters come first:
// gradients use the prefix S_trainable.

#include <cstdint>
#include <vector>

#include <c10/core/ScalarType.h>

#include "titan/tensor/placement.h"

namespace titan::fsdp {

/// The place of one parameter. Offsets and counts in elements.
struct Slot {
  std::vector<int64_t> shape;  ///< of the whole parameter
  int64_t row_numel = 1;       ///< elements of one row (product of the dims after the first)
  int64_t chunk_rows = 0;      ///< rows of a whole chunk
  int64_t offset = 0;          ///< of the chunk in the flat shard
  bool trainable = true;

  int64_t rows() const { return shape[0]; }
  int64_t chunk_numel() const { return chunk_rows * row_numel; }
};

class ShardLayout {
 public:
  /// `shapes` in slot order, the `num_trainable` trainable ones first; all have at least one dim.
  ShardLayout(const std::vector<std::vector<int64_t>>& shapes, size_t num_trainable, int num_ranks);

  const std::vector<Slot>& slots() const { return slots_; }
  int num_ranks() const { return num_ranks_; }
  int64_t shard_numel() const { return shard_numel_; }          ///< S
  int64_t trainable_numel() const { return trainable_numel_; }  ///< S_trainable
  /// Some element of the packed form belongs to no parameter.
  bool has_padding() const { return has_padding_; }
  /// The rows of parameter `slot` that rank `rank` owns.
  Chunk rows_of(size_t slot, int rank) const { return chunk_of(slots_[slot].rows(), num_ranks_, rank); }
  int64_t full_offset(size_t slot) const { return slots_[slot].offset * num_ranks_; }

 private:
  std::vector<Slot> slots_;
  int num_ranks_;
  int64_t shard_numel_ = 0;
  int64_t trainable_numel_ = 0;
  bool has_padding_ = false;
};

/// The places of parameters while they travel and when they are gathered: as in the shards, but each in the
/// dtype that it travels in. Where these differ, lengths count bytes, else elements.
class WireLayout {
 public:
  WireLayout() = default;
  WireLayout(const ShardLayout& shards, const std::vector<at::ScalarType>& dtypes);

  at::ScalarType dtype() const { return dtype_; }  ///< of the buffers: kByte where some are of a byte
  int64_t offset(size_t slot) const { return offsets_[slot]; }   ///< of its chunk in a rank's part
  int64_t chunk(size_t slot) const { return chunks_[slot]; }     ///< length of its chunk
  int64_t end(size_t slot) const { return offsets_[slot + 1]; }  ///< of its chunk and the alignment after it
  int64_t part() const { return offsets_.back(); }               ///< length of a rank's part

 private:
  at::ScalarType dtype_ = at::kFloat;
  std::vector<int64_t> offsets_{0}, chunks_;
};

}  // namespace titan::fsdp

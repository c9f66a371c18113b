#pragma once

// All tensors of a checkpoint, and which rank's file has which piece of them. Planning needs no
// communication: every rank computes the same from the same table.
//
//   part    what a rank holds of a tensor (layout.h); several ranks may have copies of it
//   piece   what a rank writes of its part: copies of a part share it out by rows, so that each element is
//           written once and all ranks write about as much

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/ScalarType.h>

#include "titan/checkpoint/layout.h"

namespace titan::checkpoint {

struct StateTensor {
  /// "model.layers.0.attention.wq.weight": UTF-8 of at most 1,000 bytes without '/', ".." and control
  /// characters
  std::string name;
  at::ScalarType dtype = at::kFloat;  ///< one that safetensors has
  std::vector<int64_t> shape;
  std::shared_ptr<const TensorLayout> layout;  ///< shared: of thousands of tensors there are a few
};

/// What a rank's file has of a tensor.
struct Piece {
  size_t tensor = 0;  ///< position in StateTable::tensors
  Box box;
};

/// A piece that has elements of what is looked for: the whole piece.
struct Source {
  int64_t rank = 0;
  Box box;
};

class StateTable {
 public:
  StateTable() = default;
  /// Throws Error that names the tensor for two of one name, for one whose name, dtype or layout isn't
  /// allowed (check_layout).
  StateTable(std::vector<StateTensor> tensors, int64_t world_size);

  int64_t world_size() const { return world_size_; }
  /// In the order of safetensors files: element size downwards, then by name.
  const std::vector<StateTensor>& tensors() const { return tensors_; }
  /// The position of a tensor.
  std::optional<size_t> find(std::string_view name) const;

  /// What `rank` writes, in the table's order, without empty pieces.
  std::vector<Piece> pieces_of(int64_t rank) const;
  /// The pieces that intersect `wanted`, by rank. The time it takes depends on their number, not on the
  /// world's.
  std::vector<Source> sources_of(size_t tensor, const Box& wanted) const;

 private:
  // How the copies of a tensor's parts share it out: piece j is written by copy (first_writer + j) mod
  // copies.
  struct Split {
    int64_t num_pieces = 1;
    int64_t first_writer = 0;
  };

  void deal_pieces();

  std::vector<StateTensor> tensors_;
  std::vector<Split> splits_;
  int64_t world_size_ = 1;
};

}  // namespace titan::checkpoint

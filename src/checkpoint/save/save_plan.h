#pragma once

// Which tensors a job has, and which pieces of them this rank writes. Made at the first save; later saves
// only check that the tensors are still the same.

#include <cstdint>
#include <string>
#include <vector>

#include "titan/checkpoint/checkpointer.h"
#include "titan/checkpoint/manifest.h"

namespace titan::checkpoint::detail {

/// A tensor of an object under its name in the checkpoint: "model.norm.weight".
struct NamedTensor {
  std::string name;
  DTensor data;
  bool duplicate = false;
};

/// An object's state under its key.
struct KeyedState {
  std::string key;
  ObjectState state;
};

/// Throws Error for a tensor without memory, and one whose local part doesn't match its box.
std::vector<NamedTensor> tensors_of(const std::vector<KeyedState>& states);

/// This rank's share of one tensor to write: rows of its part, as a tensor of its own.
struct PlannedPiece {
  std::string name;
  Box box;                     // in the global tensor
  size_t source = 0;           // position in the list of tensors that the plan was made from
  std::vector<int64_t> start;  // of the piece in the local part
  bool is_whole_rows = false;  // cut along the first dimension alone: contiguous where the local part is
  int64_t num_bytes = 0;
};

/// The texts that the ranks of a pipeline send each other: one stage's tensors as text, and from all stages'
/// texts all tensors, with equal layouts shared. Throws Error for a text that ends early.
std::string encode_stage(const std::vector<StateTensor>& tensors);
std::vector<StateTensor> decode_stages(const std::vector<std::string>& texts);

class SavePlan {
 public:
  /// Collective over the pipeline, whose stages exchange their lists of tensors. Throws Error.
  SavePlan(const std::vector<NamedTensor>& tensors, const dist::World& world, const DeviceMesh& pipeline);

  const StateTable& table() const { return table_; }
  const std::vector<PlannedPiece>& pieces() const { return pieces_; }
  /// Equal on ranks that planned the same.
  std::string digest() const;
  /// Throws Error where these aren't the tensors that the plan was made from; their memory may differ.
  void check_same(const std::vector<NamedTensor>& tensors) const;

 private:
  struct Known {
    std::string name;
    at::ScalarType dtype;
    std::vector<int64_t> global_shape;
    Box box;
    bool duplicate;
  };

  void plan_pieces(const std::vector<NamedTensor>& tensors, int64_t rank);

  std::vector<Known> known_;
  StateTable table_;
  std::vector<PlannedPiece> pieces_;
};

/// "[7, 6]"
std::string shape_text(const std::vector<int64_t>& shape);
/// A piece's elements, sharing memory with the tensor.
at::Tensor part_of(const at::Tensor& local, const PlannedPiece& piece);

}  // namespace titan::checkpoint::detail

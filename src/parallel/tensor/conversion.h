#pragma once

// From one activation layout to another, forward and backward.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include "parallel/tensor/tp_group.h"
#include "parallel/tensor/traffic.h"
#include "titan/parallel/tensor_parallel.h"

namespace titan::tp {

/// What happens to a tensor on its way.
enum class Move { None, Gather, ReduceScatter, AllReduce, Slice, Unslice };

/// "all-gather", "" for moves without communication.
const char* collective_of(Move move);

/// [Note: moves]
///   Shard     -> Replicate   all-gather      | reduce-scatter
///   Shard     -> Invariant   all-gather      | slice
///   Invariant -> Replicate   -               | all-reduce
///   Invariant -> Shard       slice           | all-gather
///   Replicate -> Shard       slice           | zeros in the other places
///   Partial   -> Invariant   all-reduce      | -
///   Partial   -> Shard       reduce-scatter  | all-gather
///   Partial   -> Replicate   all-reduce      | all-reduce
/// The second column is the first one's transpose, read off the table in ActivationLayout.
class Conversion {
 public:
  /// Throws ConfigError for pairs that aren't in the table. `module`: interned, for labels. `whole`: the size
  /// that uneven parts along the sharded dimension come to; -1: they are even.
  Conversion(ActivationLayout from, ActivationLayout to, std::shared_ptr<const TpGroup> group,
             const char* module, int64_t whole = -1);

  bool does_nothing() const { return forward_ == Move::None && backward_ == Move::None; }
  at::Tensor operator()(const at::Tensor& tensor) const;

  std::string layouts() const;
  std::string collectives() const;
  const Traffic& traffic() const { return *traffic_; }

 private:
  at::Tensor move(Move move, const at::Tensor& tensor, int64_t dim, int64_t whole, dist::Label label) const;
  void check_even(const at::Tensor& tensor, int64_t dim) const;

  friend struct ConversionBackward;
  ActivationLayout from_, to_;
  Move forward_ = Move::None, backward_ = Move::None;
  std::shared_ptr<const TpGroup> group_;
  const char* module_;
  int64_t whole_;
  std::shared_ptr<Traffic> traffic_ = std::make_shared<Traffic>();
};

}  // namespace titan::tp

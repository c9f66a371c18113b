#pragma once

// The ranks of a tensor-parallel axis, moves of activations among them, and conversions from one activation
// layout to another, forward and backward.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "parallel/scratch.h"
#include "titan/dist/collectives.h"
#include "titan/dist/device_mesh.h"
#include "titan/nn/hooks.h"
#include "titan/ops/linear.h"
#include "titan/parallel/tensor_parallel.h"

namespace titan::tp {

class TpGroup {
 public:
  explicit TpGroup(const DeviceMesh& axis) : group_(axis.group()) {}

  int index() const { return group_->rank(); }
  int count() const { return group_->size(); }

  /// Joins the ranks' parts along `dim`. `whole` is the joined size, cut as by torch.chunk; -1: all parts are
  /// as long as this rank's.
  at::Tensor gather(const at::Tensor& part, int64_t dim, int64_t whole, dist::Label label) const;
  /// This rank's part along `dim` of the sum of all ranks' tensors.
  at::Tensor reduce_scatter(const at::Tensor& summand, int64_t dim, dist::Label label) const;
  /// The sum of all ranks' tensors, in new memory, because autograd may have kept the summand.
  at::Tensor all_reduce(const at::Tensor& summand, dist::Label label) const;
  /// This rank's part along `dim`.
  at::Tensor slice(const at::Tensor& whole, int64_t dim) const;
  /// The inverse of slice(), with zeros in the other ranks' places.
  at::Tensor unslice(const at::Tensor& part, int64_t dim, int64_t whole) const;

  const std::shared_ptr<dist::Group>& group() const { return group_; }

 private:
  /// Whether the rows of a batch are sent and received in their places, by one call. If not, they are copied.
  bool takes_rows(int64_t num_rows, const at::Tensor& tensor) const;

  std::shared_ptr<dist::Group> group_;
  // Parts in the order of the ranks, as a collective has them; a batch interleaves them. One buffer is
  // enough, because calls follow each other on one stream.
  mutable Scratch by_rank_;
};

// Traffic among the axis's ranks, counted for plan_rows().

struct Traffic {
  int64_t calls = 0;
  int64_t bytes = 0;       ///< received by this rank
  std::string way;         ///< how parts are sent, for the plan's table
  const char* phase = "";  ///< label of the module's last gather
};

/// The ranks of the axis for one module, whose gathers are counted.
class CountedParts final : public ops::RankParts {
 public:
  /// `module`: interned, for labels.
  CountedParts(std::shared_ptr<const TpGroup> parts, std::shared_ptr<Traffic> traffic, const char* module)
      : parts_(std::move(parts)), traffic_(std::move(traffic)), module_(module) {}

  int index() const override { return parts_->index(); }
  int count() const override { return parts_->count(); }
  void all_gather(const at::Tensor& out, const at::Tensor& in, const char* phase) const override {
    traffic_->calls += 1;
    traffic_->phase = phase;
    traffic_->bytes += static_cast<int64_t>(in.nbytes()) * (count() - 1);
    parts_->group()->all_gather(out, in, {phase, module_}).wait();
  }

 private:
  std::shared_ptr<const TpGroup> parts_;
  std::shared_ptr<Traffic> traffic_;
  const char* module_;
};

/// One step of a conversion.
enum class Move { None, Gather, ReduceScatter, AllReduce, Slice, Unslice };

/// [Note: moves]
///   Shard     -> Replicate   all-gather      | reduce-scatter
///   Shard     -> Invariant   all-gather      | slice
///   Invariant -> Replicate   -               | all-reduce
///   Invariant -> Shard       slice           | all-gather
///   Replicate -> Shard       slice           | zeros in the other places
///   Partial   -> Invariant   all-reduce      | -
///   Partial   -> Shard       reduce-scatter  | all-gather
///   Partial   -> Replicate   all-reduce      | all-reduce
/// The second column is the backward, the transpose of the first, which follows from the table in
/// ActivationLayout.
class Conversion {
 public:
  /// Throws ConfigError for pairs that aren't in the table. `module`: interned, for labels. `whole`: the
  /// total size of uneven parts along the sharded dimension; -1: the parts are equal.
  Conversion(ActivationLayout from, ActivationLayout to, std::shared_ptr<const TpGroup> group,
             const char* module, int64_t whole = -1);

  bool does_nothing() const { return forward_ == Move::None && backward_ == Move::None; }
  at::Tensor operator()(const at::Tensor& tensor) const;

  std::string layouts() const;
  std::string collectives() const;
  const Traffic& traffic() const { return *traffic_; }

 private:
  at::Tensor move(Move move, const at::Tensor& tensor, int64_t dim, int64_t whole, dist::Label label) const;

  friend struct ConversionBackward;
  ActivationLayout from_, to_;
  Move forward_ = Move::None, backward_ = Move::None;
  std::shared_ptr<const TpGroup> group_;
  const char* module_;
  int64_t whole_;
  std::shared_ptr<Traffic> traffic_ = std::make_shared<Traffic>();
};

// The hooks that a plan puts into the PrepareInput and PrepareOutput slots.

/// Converts the floating-point tensors with these numbers among a call's arguments or results. Results
/// without dimensions (a loss) are left alone. `style`: a literal, the plan's style that this conversion
/// belongs to.
class ConversionHook final : public nn::CallHook {
 public:
  ConversionHook(Conversion conversion, std::vector<size_t> tensors, const char* style)
      : conversion_(std::move(conversion)), tensors_(std::move(tensors)), style_(style) {}

  void pre_forward(nn::HookHost& host, const nn::TensorRefs& inputs) override {
    convert(host, inputs, "argument");
  }
  void post_forward(nn::HookHost& host, const nn::TensorRefs& outputs) override {
    convert(host, outputs, "result");
  }

  const Conversion& conversion() const { return conversion_; }
  const char* style() const { return style_; }

 private:
  void convert(nn::HookHost& host, const nn::TensorRefs& tensors, const char* what) const;

  Conversion conversion_;
  std::vector<size_t> tensors_;
  const char* style_;
};

}  // namespace titan::tp

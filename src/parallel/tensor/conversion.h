#pragma once

// From one activation layout to another, forward and backward.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "parallel/tensor/tp_group.h"
#include "titan/nn/hooks.h"
#include "titan/parallel/tensor_parallel.h"

namespace titan::tp {

/// One step of a conversion.
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

// The hooks that a plan puts into the PrepareInput and PrepareOutput slots.

/// Converts the floating-point tensors of a call with these numbers. Results without dimensions (a loss) are
/// left alone. `style`: a literal, the name of the plan's style that asked for it.
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

/// Sums the gradient of `param` over the axis as autograd delivers it, unless a group of fully_shard (which
/// does so itself) owns it.
void sum_gradient(nn::HookHost& host, const at::Tensor& param, std::shared_ptr<const TpGroup> group,
                  const char* module);

}  // namespace titan::tp

#pragma once

// Attention over ranks: the ring, gathered keys, and the autograd node that both share.

#include <memory>

#include "parallel/context/key_values.h"
#include "parallel/context/sequence_layout.h"
#include "titan/dist/collectives.h"
#include "titan/nn/layers.h"
#include "titan/ops/functional.h"

namespace titan::context {

/// This rank's part of a forward, for the backward. Sizes as in ops::AttentionSum.
struct SavedAttention {
  at::Tensor q, k, v, out, log_sum_exp;
};

/// Attention that the ranks of a group compute together. One object serves all modules of a model, one call
/// at a time, because it reuses its buffers.
class DistributedAttention {
 public:
  explicit DistributedAttention(SequenceLayout layout) : layout_(layout) {}
  virtual ~DistributedAttention() = default;
  const SequenceLayout& layout() const { return layout_; }
  /// Attention of this rank's queries over the keys of all ranks.
  virtual ops::AttentionSum forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    dist::Label label) = 0;
  /// Whole gradients of this rank's queries, keys and values. Summed in at least fp32; a gradient may be
  /// rounded to its tensor's dtype.
  virtual ops::AttentionGradients backward(const SavedAttention& saved, const at::Tensor& grad,
                                           dist::Label label) = 0;

 private:
  SequenceLayout layout_;
};

/// For one module, whose name is in the records of collectives. `module` outlives the process's groups.
class ContextCore final : public nn::AttentionCore {
 public:
  ContextCore(std::shared_ptr<DistributedAttention> attention, const char* module)
      : attention_(std::move(attention)), module_(module) {}
  at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) override;

 private:
  std::shared_ptr<DistributedAttention> attention_;
  const char* module_;
};

/// Gathers the keys and values of the whole sequence, puts them in order, and attends with each of the rank's
/// chunks once. The backward gathers them again; gradients are summed over the ranks by one reduce-scatter,
/// in fp32 (float64 of float64).
class GatheredAttention final : public DistributedAttention {
 public:
  GatheredAttention(std::shared_ptr<dist::Group> group, SequenceLayout layout)
      : DistributedAttention(layout), group_(std::move(group)) {}

  ops::AttentionSum forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            dist::Label label) override;
  ops::AttentionGradients backward(const SavedAttention& saved, const at::Tensor& grad,
                                   dist::Label label) override;

 private:
  KeyValues gather(const KeyValues& own, dist::Label label);
  KeyValues reduce(const at::Tensor& whole, dist::Label label);

  std::shared_ptr<dist::Group> group_;
  Scratch own_, by_rank_, in_order_, gradients_;
};

/// [Note: ring attention]
/// At hop i rank r has the keys and values of rank (r - i) mod N, and adds its queries' attention over them
/// to a sum in fp32 ([Note: attention in parts]) while the keys of hop i + 1 travel. In the backward, keys
/// travel around the ring again; each hop adds to the gradients of the rank's own queries and to those of the
/// current keys, which follow their keys around the ring and end at the keys' own rank.
class RingAttention final : public DistributedAttention {
 public:
  RingAttention(std::shared_ptr<dist::Group> group, SequenceLayout layout, ContextRotateMethod method);

  ops::AttentionSum forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            dist::Label label) override;
  ops::AttentionGradients backward(const SavedAttention& saved, const at::Tensor& grad,
                                   dist::Label label) override;

 private:
  int rank_, num_ranks_;
  std::unique_ptr<KeyValueRotation> rotation_;
  GradientRing gradient_ring_;
};

}  // namespace titan::context

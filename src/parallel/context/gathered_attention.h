#pragma once

#include "parallel/context/distributed_attention.h"
#include "parallel/context/key_values.h"
#include "parallel/context/sequence_layout.h"

namespace titan::context {

/// Gathers the keys and values of the whole sequence, puts them in order, and attends with each of the rank's
/// chunks once. The backward gathers them again; gradients are summed over the ranks by one reduce-scatter,
/// in fp32 (float64 of float64).
class GatheredAttention final : public DistributedAttention {
 public:
  GatheredAttention(std::shared_ptr<dist::Group> group, SequenceLayout layout)
      : DistributedAttention(layout), group_(std::move(group)) {}

  ops::AttentionSum forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            dist::Label label) override;
  ops::AttentionGradients backward(const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k,
                                   const at::Tensor& v, const at::Tensor& out, const at::Tensor& log_sum_exp,
                                   dist::Label label) override;

 private:
  KeyValues gather(const KeyValues& own, dist::Label label);
  KeyValues reduce(const at::Tensor& whole, dist::Label label);

  std::shared_ptr<dist::Group> group_;
  Buffer own_, by_rank_, in_order_, gradients_;
};

}  // namespace titan::context

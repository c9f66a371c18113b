#pragma once

#include "parallel/context/distributed_attention.h"
#include "parallel/context/key_values.h"
#include "parallel/context/sequence_layout.h"

namespace titan::context {

/// [Note: ring attention]
/// At hop i rank r has the keys and values of rank (r - i) mod N, and adds its queries' attention over them
/// to a sum in fp32 ([Note: attention in parts]); the keys of hop i + 1 are on their way meanwhile. In the
/// backward they come round once more; each hop gives gradients of the rank's own queries, and contributions
/// to those of the keys at hand, which follow their keys on the ring and end at home.
class RingAttention final : public DistributedAttention {
 public:
  RingAttention(std::shared_ptr<dist::Group> group, SequenceLayout layout, ContextRotateMethod method);

  ops::AttentionSum forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            dist::Label label) override;
  ops::AttentionGradients backward(const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k,
                                   const at::Tensor& v, const at::Tensor& out, const at::Tensor& log_sum_exp,
                                   dist::Label label) override;

 private:
  int rank_, num_ranks_;
  std::unique_ptr<KeyValueRotation> rotation_;
  GradientRing gradient_ring_;
};

}  // namespace titan::context

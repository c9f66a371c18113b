#include "parallel/context/ring_attention.h"

#include <ATen/ops/zeros.h>

namespace titan::context {

namespace {

at::Tensor queries_of(const at::Tensor& x, const Block& block) {
  return x.narrow(1, block.first_row, block.num_rows);
}
at::Tensor keys_of(const at::Tensor& x, const Block& block) {
  return x.narrow(1, block.first_key, block.num_keys);
}

}  // namespace

RingAttention::RingAttention(std::shared_ptr<dist::Group> group, SequenceLayout layout,
                             ContextRotateMethod method)
    : DistributedAttention(layout),
      rank_(group->rank()),
      num_ranks_(group->size()),
      rotation_(make_rotation(group, method)),
      gradient_ring_(group) {}

ops::AttentionSum RingAttention::forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                         dist::Label label) {
  const auto sum = ops::AttentionSum::of_no_keys(q);
  KeyValues held{k, v};
  rotation_->start(held, label);
  for (int hop = 0; hop < num_ranks_; ++hop) {
    if (hop > 0) held = rotation_->hop(hop);
    const auto block = layout().block(rank_, (rank_ - hop + num_ranks_) % num_ranks_, q.size(1));
    if (!block) continue;
    ops::attend(sum.rows(block->first_row, block->num_rows), queries_of(q, *block), keys_of(held.k, *block),
                keys_of(held.v, *block), block->first_query);
  }
  return sum;
}

ops::AttentionGradients RingAttention::backward(const at::Tensor& grad, const at::Tensor& q,
                                                const at::Tensor& k, const at::Tensor& v,
                                                const at::Tensor& out, const at::Tensor& log_sum_exp,
                                                dist::Label label) {
  const at::ScalarType dtype = log_sum_exp.scalar_type();
  const at::Tensor grad_q = at::zeros(q.sizes(), q.options().dtype(dtype));
  KeyValues held{k, v};
  rotation_->start(held, label);
  KeyValues contributions = gradient_ring_.start(k, dtype, label);
  for (int hop = 0; hop < num_ranks_; ++hop) {
    if (hop > 0) {
      held = rotation_->hop(hop);
      contributions = gradient_ring_.next();
    }
    const auto block = layout().block(rank_, (rank_ - hop + num_ranks_) % num_ranks_, q.size(1));
    if (block)
      ops::attend_backward(
          {queries_of(grad_q, *block), keys_of(contributions.k, *block), keys_of(contributions.v, *block)},
          queries_of(grad, *block), queries_of(q, *block), keys_of(held.k, *block), keys_of(held.v, *block),
          queries_of(out, *block), log_sum_exp.narrow(2, block->first_row, block->num_rows),
          block->first_query);
    gradient_ring_.pass_on(block.has_value());
  }
  const KeyValues own = gradient_ring_.finish();
  // The ring's memory is the next layer's; so these are copies, rounded on the way.
  const auto copy = [&](const at::Tensor& x) {
    return x.to(k.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  };
  return {grad_q, copy(own.k), copy(own.v)};
}

}  // namespace titan::context

#include "parallel/context/gathered_attention.h"

#include <ATen/core/DimVector.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace titan::context {

namespace {

// Calls copy(chunk of by_rank [N, 2, B, S, ...], the same chunk of in_order [2, B, N S, ...]).
template <class Copy>
void for_each_chunk(const SequenceLayout& layout, const at::Tensor& by_rank, const at::Tensor& in_order,
                    Copy copy) {
  const int64_t length = by_rank.size(3) / layout.chunks_per_rank();
  for (int rank = 0; rank < layout.num_ranks(); ++rank)
    for (int i = 0; i < layout.chunks_per_rank(); ++i)
      copy(by_rank.select(0, rank).narrow(2, i * length, length),
           in_order.narrow(2, layout.chunk(rank, i) * length, length));
}

at::DimVector sizes_by_rank(const at::Tensor& packed, int num_ranks) {
  at::DimVector sizes(packed.sizes());
  sizes.insert(sizes.begin(), num_ranks);
  return sizes;
}

at::DimVector sizes_in_order(const at::Tensor& k, int num_ranks) {
  return {2, k.size(0), k.size(1) * num_ranks, k.size(2), k.size(3)};
}

}  // namespace

KeyValues GatheredAttention::gather(const KeyValues& own, dist::Label label) {
  const at::Tensor packed = own.pack(own_);
  const at::Tensor by_rank = by_rank_.get(sizes_by_rank(packed, group_->size()), packed.options());
  group_->all_gather(by_rank, packed, label).wait();
  const at::Tensor in_order = in_order_.get(sizes_in_order(own.k, group_->size()), packed.options());
  for_each_chunk(layout(), by_rank, in_order,
                 [](const at::Tensor& from, const at::Tensor& to) { to.copy_(from); });
  return KeyValues::of_packed(in_order);
}

KeyValues GatheredAttention::reduce(const at::Tensor& whole, dist::Label label) {
  const int num_ranks = group_->size();
  at::DimVector sizes(whole.sizes());
  sizes[2] /= num_ranks;
  const at::Tensor own = at::empty(sizes, whole.options());
  const at::Tensor by_rank = by_rank_.get(sizes_by_rank(own, num_ranks), whole.options());
  for_each_chunk(layout(), by_rank, whole,
                 [](const at::Tensor& to, const at::Tensor& from) { to.copy_(from); });
  group_->reduce_scatter(own, by_rank, label).wait();
  return KeyValues::of_packed(own);
}

ops::AttentionSum GatheredAttention::forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                             dist::Label label) {
  const auto sum = ops::AttentionSum::of_no_keys(q);
  const KeyValues whole = gather({k, v}, label);
  for (int i = 0; i < layout().chunks_per_rank(); ++i) {
    const Block block = layout().block_of_whole(group_->rank(), i, q.size(1));
    ops::attend(sum.rows(block.first_row, block.num_rows), q.narrow(1, block.first_row, block.num_rows),
                whole.k.narrow(1, 0, block.num_keys), whole.v.narrow(1, 0, block.num_keys),
                block.first_query);
  }
  return sum;
}

ops::AttentionGradients GatheredAttention::backward(const at::Tensor& grad, const at::Tensor& q,
                                                    const at::Tensor& k, const at::Tensor& v,
                                                    const at::Tensor& out, const at::Tensor& log_sum_exp,
                                                    dist::Label label) {
  const KeyValues whole = gather({k, v}, label);
  const auto options = q.options().dtype(log_sum_exp.scalar_type());
  const at::Tensor grad_q = at::zeros(q.sizes(), options);
  const at::Tensor grads = gradients_.get(sizes_in_order(k, group_->size()), options).zero_();
  for (int i = 0; i < layout().chunks_per_rank(); ++i) {
    const Block block = layout().block_of_whole(group_->rank(), i, q.size(1));
    const auto rows = [&](const at::Tensor& x) { return x.narrow(1, block.first_row, block.num_rows); };
    const auto keys = [&](const at::Tensor& x) { return x.narrow(1, 0, block.num_keys); };
    ops::attend_backward({rows(grad_q), keys(grads.select(0, 0)), keys(grads.select(0, 1))}, rows(grad),
                         rows(q), keys(whole.k), keys(whole.v), rows(out),
                         log_sum_exp.narrow(2, block.first_row, block.num_rows), block.first_query);
  }
  const KeyValues own = reduce(grads, label);
  return {grad_q, own.k, own.v};
}

}  // namespace titan::context

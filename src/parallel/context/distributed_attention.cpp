#include "parallel/context/distributed_attention.h"

#include <ATen/core/DimVector.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "ops/autograd_node.h"
#include "ops/saved_outputs.h"
#include "titan/core/error.h"

namespace titan::context {

namespace {

using ops::SavedVariable;
using torch::autograd::variable_list;

// Not an ops::BackwardNode: peers run their part of the backward even if this rank's loss doesn't depend on
// its output, so a missing gradient counts as zeros.
struct DistributedAttentionBackward final : torch::autograd::Node {
  SavedVariable q, k, v, out, log_sum_exp;
  std::shared_ptr<DistributedAttention> attention;
  const char* module = "";

  variable_list apply(variable_list&& grads) override {
    TITAN_CHECK(!at::GradMode::is_enabled(), name(),
                " has no second derivative: call backward with create_graph = false");
    // Unpacked before the first collective: unpacking may make a checkpoint run the module again.
    const SavedAttention saved{q.unpack(), k.unpack(), v.unpack(), out.unpack(getptr()),
                               log_sum_exp.unpack()};
    const at::Tensor grad = grads[0].defined() ? grads[0] : at::zeros_like(saved.out);
    ops::BelowAutograd guard;
    const auto found = attention->backward(saved, grad, {"context_parallel::backward", module});
    const auto dtype = saved.q.scalar_type();
    return {found.q_BSHD.to(dtype), found.k_BTKD.to(dtype), found.v_BTKD.to(dtype)};
  }
  void release_variables() override {
    for (SavedVariable* saved : {&q, &k, &v, &out, &log_sum_exp}) saved->reset_data();
  }
  std::string name() const override { return "titan::distributed_attention backward"; }
};

using Result = std::tuple<at::Tensor, at::Tensor>;

// Blocks are computed from the number of a rank's tokens, so they would be wrong for a module that adds or
// drops some.
void check_inputs(const SequenceLayout& layout, const char* module, const at::Tensor& q, const at::Tensor& k,
                  const at::Tensor& v) {
  TITAN_CHECK(q.dim() == 4 && k.dim() == 4 && k.sizes() == v.sizes() && q.size(0) == k.size(0) &&
                  q.size(1) == k.size(1) && q.size(3) == k.size(3) && k.size(2) > 0 &&
                  q.size(2) % k.size(2) == 0,
              "context parallelism: module '", module,
              "' has to attend with q [B, S, H, E] and k, v [B, S, K, E], H a multiple of K, got ", q.sizes(),
              ", ", k.sizes(), ", ", v.sizes());
  TITAN_CHECK(q.size(1) > 0 && q.size(1) % layout.chunks_per_rank() == 0, "context parallelism: module '",
              module, "' attends with ", q.size(1), " tokens of this rank, which holds ",
              layout.chunks_per_rank(), " chunks of one length; a module must not add or drop tokens");
}

}  // namespace

at::Tensor ContextCore::attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  check_inputs(attention_->layout(), module_, q, k, v);
  std::shared_ptr<DistributedAttentionBackward> node;
  if (ops::compute_requires_grad(q, k, v)) {
    // Before the attention ([Note: kept outputs]).
    node = ops::make_node<DistributedAttentionBackward>(q, k, v);
    node->attention = attention_;
    node->module = module_;
    node->q = ops::save_input(q);
    node->k = ops::save_input(k);
    node->v = ops::save_input(v);
  }
  const auto [out, log_sum_exp] = ops::kept(ops::KeptKind::Attention, {}, [&]() -> Result {
    const ops::AttentionSum sum = attention_->forward(q, k, v, {"context_parallel::forward", module_});
    return {sum.out_BSHD.to(q.scalar_type()), sum.log_sum_exp_BHS};
  });
  if (!node) return out;
  ops::set_history(out, node);
  node->out = SavedVariable(out, /*is_output=*/true);
  node->log_sum_exp = ops::save_input(log_sum_exp);
  return out;
}

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
    ops::attend(sum.rows(block.first_row, block.num_rows),
                {q.narrow(1, block.first_row, block.num_rows), whole.k.narrow(1, 0, block.num_keys),
                 whole.v.narrow(1, 0, block.num_keys)},
                block.first_query);
  }
  return sum;
}

ops::AttentionGradients GatheredAttention::backward(const SavedAttention& saved, const at::Tensor& grad,
                                                    dist::Label label) {
  const auto& [q, k, v, out, log_sum_exp] = saved;
  const KeyValues whole = gather({k, v}, label);
  const auto options = q.options().dtype(log_sum_exp.scalar_type());
  const at::Tensor grad_q = at::zeros(q.sizes(), options);
  const at::Tensor grads = gradients_.get(sizes_in_order(k, group_->size()), options).zero_();
  for (int i = 0; i < layout().chunks_per_rank(); ++i) {
    const Block block = layout().block_of_whole(group_->rank(), i, q.size(1));
    const auto rows = [&](const at::Tensor& x) { return x.narrow(1, block.first_row, block.num_rows); };
    const auto keys = [&](const at::Tensor& x) { return x.narrow(1, 0, block.num_keys); };
    ops::attend_backward({rows(grad_q), keys(grads.select(0, 0)), keys(grads.select(0, 1))}, rows(grad),
                         {rows(q), keys(whole.k), keys(whole.v)},
                         {rows(out), log_sum_exp.narrow(2, block.first_row, block.num_rows)},
                         block.first_query);
  }
  const KeyValues own = reduce(grads, label);
  return {grad_q, own.k, own.v};
}

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
    ops::attend(sum.rows(block->first_row, block->num_rows),
                {queries_of(q, *block), keys_of(held.k, *block), keys_of(held.v, *block)},
                block->first_query);
  }
  return sum;
}

ops::AttentionGradients RingAttention::backward(const SavedAttention& saved, const at::Tensor& grad,
                                                dist::Label label) {
  const auto& [q, k, v, out, log_sum_exp] = saved;
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
          queries_of(grad, *block), {queries_of(q, *block), keys_of(held.k, *block), keys_of(held.v, *block)},
          {queries_of(out, *block), log_sum_exp.narrow(2, block->first_row, block->num_rows)},
          block->first_query);
    gradient_ring_.pass_on(block.has_value());
  }
  const KeyValues own = gradient_ring_.finish();
  // The next layer reuses the ring's memory, so these are copies, already rounded.
  const auto copy = [&](const at::Tensor& x) {
    return x.to(k.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  };
  return {grad_q, copy(own.k), copy(own.v)};
}

}  // namespace titan::context

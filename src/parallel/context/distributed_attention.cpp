#include "parallel/context/distributed_attention.h"

#include <ATen/ops/zeros_like.h>

#include "ops/autograd_node.h"
#include "titan/core/error.h"
#include "titan/ops/saved_outputs.h"

namespace titan::context {

namespace {

using ops::SavedVariable;
using torch::autograd::variable_list;

// Not ops::BackwardNode: the peers run their part of the backward whether or not this rank's output took part
// in its loss, so a missing gradient is one of zeros.
struct DistributedAttentionBackward final : torch::autograd::Node {
  SavedVariable q, k, v, out, log_sum_exp;
  std::shared_ptr<DistributedAttention> attention;
  const char* module = "";

  variable_list apply(variable_list&& grads) override {
    TITAN_CHECK(!at::GradMode::is_enabled(), name(),
                " has no second derivative: call backward with create_graph = false");
    // All of them before the first collective: a checkpoint may run the module again for the first.
    const at::Tensor queries = q.unpack(), keys = k.unpack(), values = v.unpack(),
                     result = out.unpack(getptr()), sums = log_sum_exp.unpack();
    const at::Tensor grad = grads[0].defined() ? grads[0] : at::zeros_like(result);
    ops::BelowAutograd guard;
    const auto found = attention->backward(grad, queries, keys, values, result, sums,
                                           {"context_parallel::backward", module});
    const auto dtype = queries.scalar_type();
    return {found.q_BSHD.to(dtype), found.k_BTKD.to(dtype), found.v_BTKD.to(dtype)};
  }
  void release_variables() override {
    for (SavedVariable* saved : {&q, &k, &v, &out, &log_sum_exp}) saved->reset_data();
  }
  std::string name() const override { return "titan::distributed_attention backward"; }
};

using Result = std::tuple<at::Tensor, at::Tensor>;

// Blocks are computed from the number of a rank's tokens, so a module that adds or drops some would see wrong
// ones.
void check_inputs(const SequenceLayout& layout, const char* module, const at::Tensor& q, const at::Tensor& k,
                  const at::Tensor& v) {
  TITAN_CHECK(q.dim() == 4 && k.dim() == 4 && k.sizes() == v.sizes() && q.size(0) == k.size(0) &&
                  q.size(1) == k.size(1) && q.size(3) == k.size(3) && k.size(2) > 0 &&
                  q.size(2) % k.size(2) == 0,
              "context parallelism: module '", module,
              "' has to attend with q [B, S, H, E] and k, v [B, S, K, E], H a multiple of K, got ", q.sizes(),
              ", ", k.sizes(), ", ", v.sizes());
  TITAN_CHECK(
      q.size(1) > 0 && q.size(1) % layout.chunks_per_rank() == 0, "context parallelism: module '", module,
      "' attends with ", q.size(1), " tokens of this rank, which holds ", layout.chunks_per_rank(),
      " chunks of one length; a module must neither add tokens to those that it is given nor drop any");
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
    ops::BelowAutograd guard;
    const ops::AttentionSum sum = attention_->forward(q, k, v, {"context_parallel::forward", module_});
    return {sum.out_BSHD.to(q.scalar_type()), sum.log_sum_exp_BHS};
  });
  if (!node) return out;
  ops::set_history(out, node);
  node->out = SavedVariable(out, /*is_output=*/true);
  node->log_sum_exp = ops::save_input(log_sum_exp);
  return out;
}

}  // namespace titan::context

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

}  // namespace

at::Tensor ContextCore::attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
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

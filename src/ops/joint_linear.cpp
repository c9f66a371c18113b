#include "titan/ops/joint_linear.h"

#include "ops/joint_node.h"
#include "titan/ops/saved_outputs.h"

namespace titan::ops {

namespace {

struct JointLinearsBackward final : JointNode {
  std::vector<int64_t> x_sizes;

  void backward(const variable_list& grads, variable_list& results) override {
    if (task_should_compute_output(0)) results[0] = grad_input(grads).view(x_sizes);
    weight_gradients(grads, results);
  }
  at::Tensor grad_input(const variable_list& grads) const {
    at::Tensor sum;
    for (size_t i = 0; i < weights.size(); ++i) {
      if (!grads[i].defined()) continue;
      const at::Tensor grad_NO = as_rows(grads[i]), weight = weights[i].unpack();
      sum = sum.defined() ? products->add_grad_input(sum, grad_NO, weight)
                          : products->grad_input(grad_NO, weight);
    }
    return sum;
  }
  std::string name() const override { return "titan::joint_linears backward"; }
};

void check_shapes(const at::Tensor& x, const at::Tensor& weight) {
  TITAN_CHECK(weight.dim() == 2 && x.dim() >= 1 && x.size(-1) == weight.size(1), "joint_linears: x ",
              x.sizes(), " doesn't fit weight ", weight.sizes(), "; expected [..., in] and [out, in]");
  TITAN_CHECK(x.scalar_type() == weight.scalar_type(), "joint_linears: x is ", x.scalar_type(),
              ", the weight ", weight.scalar_type());
}

}  // namespace

std::vector<at::Tensor> joint_linears(const at::Tensor& x, const std::vector<SinkedWeight>& weights,
                                      const std::shared_ptr<const Products>& products) {
  for (const SinkedWeight& each : weights) check_shapes(x, each.weight);
  const auto node = make_joint_node<JointLinearsBackward>(x, weights, products);
  if (node && any_requires_grad(weights))
    node->x = save_input(x);  // before the products ([Note: kept outputs])
  if (node) node->x_sizes = x.sizes().vec();
  std::vector<at::Tensor> outputs;
  for (const SinkedWeight& each : weights) {
    outputs.push_back(kept(KeptKind::Product, each.weight, [&] {
      BelowAutograd guard;
      std::vector<int64_t> sizes = x.sizes().vec();
      sizes.back() = each.weight.size(0);
      return products->forward(as_rows(x), each.weight).view(sizes);
    }));
  }
  if (node)
    for (at::Tensor& output : outputs) torch::autograd::set_history(output, node);
  return outputs;
}

}  // namespace titan::ops

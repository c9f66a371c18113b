#include "titan/ops/joint_linear.h"

#include "ops/joint_node.h"
#include "titan/ops/saved_outputs.h"

namespace titan::ops {

namespace {

struct JointLinearsBackward final : JointNode {
  std::vector<int64_t> x_sizes;

  void backward(const variable_list& grads, variable_list& results) override {
    const at::Tensor grad_x = both_gradients(grads, results);
    if (grad_x.defined()) results[0] = grad_x.view(x_sizes);
  }
  std::string name() const override { return "titan::joint_linears backward"; }
};

void check_joint_shapes(const at::Tensor& x, const at::Tensor& weight) {
  TITAN_CHECK(weight.dim() == 2 && x.dim() >= 1 && x.size(-1) == weight.size(1), "joint_linears: x ",
              x.sizes(), " doesn't fit weight ", weight.sizes(), "; expected [..., in] and [out, in]");
  TITAN_CHECK(x.scalar_type() == weight.scalar_type(), "joint_linears: x is ", x.scalar_type(),
              ", the weight ", weight.scalar_type());
}

}  // namespace

std::vector<at::Tensor> joint_linears(const at::Tensor& x, const std::vector<SinkedWeight>& weights,
                                      const std::shared_ptr<const Products>& products) {
  for (const SinkedWeight& each : weights) check_joint_shapes(x, each.weight);
  const std::vector<std::shared_ptr<const Products>> of_each(weights.size(), products);
  const auto node = make_joint_node<JointLinearsBackward>(x, weights, of_each);
  const bool keeps = node && any_requires_grad(weights);
  Operand input;
  {
    BelowAutograd guard;
    input = products->input(as_rows(x), keeps);
  }
  if (keeps) node->x = SavedInput(x, input, *products);  // before the products ([Note: kept outputs])
  if (node) node->x_sizes = x.sizes().vec();
  std::vector<at::Tensor> outputs;
  for (const SinkedWeight& each : weights) {
    outputs.push_back(kept(KeptKind::Product, each.weight, [&] {
      BelowAutograd guard;
      std::vector<int64_t> sizes = x.sizes().vec();
      sizes.back() = each.weight.size(0);
      return products->forward(input, operand_of(each)).view(sizes);
    }));
  }
  if (node)
    for (at::Tensor& output : outputs) torch::autograd::set_history(output, node);
  return outputs;
}

}  // namespace titan::ops

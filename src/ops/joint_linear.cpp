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
                                      const ProductsOfEach& products) {
  for (const SinkedWeight& each : weights) check_joint_shapes(x, each.weight);
  const auto node = make_joint_node<JointLinearsBackward>(x, weights, products);
  const std::vector<bool> keeps = keeps_of(node, weights);
  JointInput input(products, keeps);
  Operand rows;
  {
    BelowAutograd guard;
    rows = as_rows(x);
  }
  for (size_t i = 0; i < weights.size(); ++i) input.scaled(i, rows);
  if (keeps_any(keeps)) node->x.save(x, rows, input);  // before the products ([Note: kept outputs])
  if (node) node->x_sizes = x.sizes().vec();
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < weights.size(); ++i) {
    outputs.push_back(kept(KeptKind::Product, weights[i].weight, [&] {
      BelowAutograd guard;
      std::vector<int64_t> sizes = x.sizes().vec();
      sizes.back() = weights[i].weight.size(0);
      return products[i]->forward(input.cast(i, rows), operand_of(weights[i])).view(sizes);
    }));
  }
  if (node)
    for (at::Tensor& output : outputs) torch::autograd::set_history(output, node);
  return outputs;
}

std::vector<at::Tensor> joint_linears(const at::Tensor& x, const std::vector<SinkedWeight>& weights,
                                      const std::shared_ptr<const Products>& products) {
  return joint_linears(x, weights, ProductsOfEach(weights.size(), products));
}

}  // namespace titan::ops

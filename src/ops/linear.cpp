#include "titan/ops/linear.h"

#include <ATen/core/grad_mode.h>

#include "ops/joint_node.h"
#include "titan/ops/saved_outputs.h"

namespace titan::ops {

namespace {

std::vector<int64_t> with_last(at::IntArrayRef sizes, int64_t last) {
  std::vector<int64_t> result = sizes.vec();
  result.back() = last;
  return result;
}

struct LinearBackward final : BackwardNode {
  enum Input : size_t { X, Weight, Bias };
  SavedInput x;
  SavedVariable weight;
  std::vector<int64_t> x_sizes;
  std::shared_ptr<const Products> products;
  std::shared_ptr<GradSink> weight_sink;
  std::shared_ptr<const WeightSource> weight_source;

  variable_list backward(const at::Tensor& grad) override {
    variable_list grads(3);
    const bool wants_x = task_should_compute_output(X), wants_weight = task_should_compute_output(Weight);
    const at::Tensor grad_NO = as_rows(grad);
    const Operand operand = products->grad(grad_NO, wants_x, wants_weight);
    if (wants_x) grads[X] = products->grad_input(operand, unpacked(weight, weight_source)).view(x_sizes);
    if (wants_weight) grads[Weight] = weight_gradient(products, weight_sink, operand, as_rows(x.unpack()));
    if (task_should_compute_output(Bias)) grads[Bias] = grad_NO.sum(0);
    return grads;
  }
  void release_variables() override {
    x.reset_data();
    weight.reset_data();
  }
  std::string name() const override { return "titan::linear backward"; }
};

void check_shapes(const at::Tensor& x, const at::Tensor& weight) {
  TITAN_CHECK(weight.dim() == 2 && x.dim() >= 1 && x.size(-1) == weight.size(1), "linear: x ", x.sizes(),
              " doesn't fit weight ", weight.sizes(), "; expected [..., in] and [out, in]");
  TITAN_CHECK(x.scalar_type() == weight.scalar_type(), "linear: x is ", x.scalar_type(), ", the weight ",
              weight.scalar_type());
}

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                  const std::shared_ptr<const Products>& products,
                  const std::shared_ptr<GradSink>& weight_sink,
                  const std::shared_ptr<const WeightSource>& weight_source) {
  check_shapes(x, weight);
  const bool keeps = compute_requires_grad(weight);
  Operand input;
  {
    BelowAutograd guard;
    input = products->scaled(as_rows(x), at::GradMode::is_enabled());
  }
  std::shared_ptr<LinearBackward> node;
  if (compute_requires_grad(x, weight, bias)) {
    // Before the product ([Note: kept outputs]).
    node = make_node<LinearBackward>(x, weight, bias);
    if (keeps) node->x = SavedInput(x, input, *products);
    if (x.requires_grad() && !weight_source) node->weight = save_input(weight);
    node->x_sizes = x.sizes().vec();
    node->products = products;
    node->weight_sink = weight_sink;
    node->weight_source = weight_source;
  }
  const at::Tensor y = kept(KeptKind::Product, weight, [&] {
    BelowAutograd guard;
    const at::Tensor rows = products->forward(input, weight_source ? weight_source->weight() : weight);
    if (bias.defined()) rows.add_(bias);
    return rows.view(with_last(x.sizes(), weight.size(0)));
  });
  if (node) set_history(y, node);
  return y;
}

}  // namespace titan::ops

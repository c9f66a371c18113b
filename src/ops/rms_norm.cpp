#include "titan/ops/rms_norm.h"

#include "ops/autograd_node.h"
#include "ops/operators.h"

namespace titan::ops {

namespace {

struct RmsNormBackward final : BackwardNode {
  enum Input : size_t { X, Weight };
  SavedVariable x, weight, rstd;
  std::shared_ptr<GradSink> weight_sink;

  variable_list backward(const at::Tensor& grad) override {
    using Signature = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&,
                                                         const at::Tensor&, const at::Tensor&);
    static const auto op = find_operator<Signature>("titan::rms_norm_backward");
    const at::Tensor scales = weight.unpack();
    auto [grad_x, grad_weight] = op.call(grad, x.unpack(), scales, rstd.unpack());
    variable_list grads(2);
    if (task_should_compute_output(X)) grads[X] = std::move(grad_x);
    if (!task_should_compute_output(Weight)) return grads;
    if (weight_sink) {
      // A vector, summed in the pass that makes grad_x; where weights' gradients wait, so does this one.
      weight_sink->accept({.compute = [sum = grad_weight] { return sum; }, .reads = {grad_weight}});
    } else {
      grads[Weight] = grad_weight.to(scales.scalar_type());
    }
    return grads;
  }
  void release_variables() override {
    x.reset_data();
    weight.reset_data();
    rstd.reset_data();
  }
  std::string name() const override { return "titan::rms_norm backward"; }
};

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight_D, double eps,
                    const std::shared_ptr<GradSink>& weight_sink) {
  TITAN_CHECK(weight_D.dim() == 1 && x.dim() >= 1 && x.size(-1) == weight_D.size(0), "rms_norm: x ",
              x.sizes(), " doesn't fit weight ", weight_D.sizes());
  using Signature = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, double);
  static const auto op = find_operator<Signature>("titan::rms_norm");
  at::Tensor y, rstd;
  {
    BelowAutograd guard;
    std::tie(y, rstd) = op.call(x, weight_D, eps);
  }
  if (!compute_requires_grad(x, weight_D)) return y;
  const auto node = record<RmsNormBackward>(y, x, weight_D);
  node->x = save_input(x);
  node->weight = save_input(weight_D);
  node->rstd = save_input(rstd);
  node->weight_sink = weight_sink;
  return y;
}

}  // namespace titan::ops

#include "adam_step.h"

#include <cmath>

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>

// [Note: Adam]
// Kingma and Ba, 2015; with decoupled decay Loshchilov and Hutter, 2019. The order of operations is
// torch.optim's, so that each implementation rounds as its namesake there:
//   exp_avg <- lerp(exp_avg, grad, 1 - beta1);  exp_avg_sq <- beta2 exp_avg_sq + (1 - beta2) grad^2
//   param <- param - lr / (1 - beta1^t) * exp_avg / (sqrt(exp_avg_sq) / sqrt(1 - beta2^t) + eps)

namespace titan::optim {
namespace {

// The factors of the bias corrections at a parameter's step, computed in double.
struct Corrections {
  double step_size = 0;    // lr / (1 - beta1^t)
  double denominator = 0;  // sqrt(1 - beta2^t)
};

Corrections corrections(const at::Tensor& step, const AdamOptions& options) {
  double t = *step.const_data_ptr<float>();
  return {options.lr / (1 - std::pow(options.beta1, t)), std::sqrt(1 - std::pow(options.beta2, t))};
}

}  // namespace

void fused_adam_step(const AdamLists& lists, const AdamOptions& options, WeightDecay decay) {
  fused_adam_step_unless({}, lists, options, decay);
}

void fused_adam_step_unless(const at::Tensor& skip, const AdamLists& lists, const AdamOptions& options,
                            WeightDecay decay) {
  auto step = decay == WeightDecay::Decoupled
                  ? static_cast<decltype(&at::_ops::_fused_adamw_::call)>(&at::_ops::_fused_adamw_::call)
                  : static_cast<decltype(&at::_ops::_fused_adamw_::call)>(&at::_ops::_fused_adam_::call);
  step(lists.params, lists.grads, lists.exp_avgs, lists.exp_avg_sqs, /*max_exp_avg_sqs=*/{}, lists.steps,
       options.lr, options.beta1, options.beta2, options.weight_decay, options.eps, /*amsgrad=*/false,
       /*maximize=*/false,
       /*grad_scale=*/{}, /*found_inf=*/skip.defined() ? std::optional(skip) : std::nullopt);
  // LibTorch's fused kernels write without raising version counters, by which sharding sees that its copies
  // are stale.
  for (const at::Tensor& param : lists.params) param.unsafeGetTensorImpl()->bump_version();
}

void foreach_adam_step(const AdamLists& lists, const AdamOptions& options, WeightDecay decay) {
  std::vector<at::Tensor> grads = lists.grads;
  if (options.weight_decay != 0 && decay == WeightDecay::Decoupled) {
    at::_foreach_mul_(lists.params, 1 - options.lr * options.weight_decay);
  } else if (options.weight_decay != 0) {
    grads = at::_foreach_add(grads, lists.params, options.weight_decay);
  }
  at::_foreach_lerp_(lists.exp_avgs, grads, 1 - options.beta1);
  at::_foreach_mul_(lists.exp_avg_sqs, options.beta2);
  at::_foreach_addcmul_(lists.exp_avg_sqs, grads, grads, 1 - options.beta2);

  std::vector<at::Scalar> step_sizes, denominators;
  for (const auto& step : lists.steps) {
    auto [step_size, denominator] = corrections(step, options);
    step_sizes.emplace_back(-step_size);
    denominators.emplace_back(denominator);
  }
  std::vector<at::Tensor> roots = at::_foreach_sqrt(lists.exp_avg_sqs);
  at::_foreach_div_(roots, denominators);
  at::_foreach_add_(roots, options.eps);
  at::_foreach_addcdiv_(lists.params, lists.exp_avgs, roots, step_sizes);
}

void for_loop_adam_step(const AdamLists& lists, const AdamOptions& options, WeightDecay decay) {
  for (size_t i = 0; i < lists.params.size(); ++i) {
    at::Tensor param = lists.params[i], grad = lists.grads[i];
    at::Tensor exp_avg = lists.exp_avgs[i], exp_avg_sq = lists.exp_avg_sqs[i];
    if (options.weight_decay != 0 && decay == WeightDecay::Decoupled) {
      param.mul_(1 - options.lr * options.weight_decay);
    } else if (options.weight_decay != 0) {
      grad = grad.add(param, options.weight_decay);
    }
    exp_avg.lerp_(grad, 1 - options.beta1);
    exp_avg_sq.mul_(options.beta2).addcmul_(grad, grad, 1 - options.beta2);
    auto [step_size, denominator] = corrections(lists.steps[i], options);
    param.addcdiv_(exp_avg, exp_avg_sq.sqrt().div_(denominator).add_(options.eps), -step_size);
  }
}

}  // namespace titan::optim

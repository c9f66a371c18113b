// [Note: Adam]
// Kingma and Ba, 2015; with decoupled decay, Loshchilov and Hutter, 2019. The order of operations is
// torch.optim's, so that each implementation rounds as the one of the same name there:
//   exp_avg <- lerp(exp_avg, grad, 1 - beta1);  exp_avg_sq <- beta2 exp_avg_sq + (1 - beta2) grad^2
//   param <- param - lr / (1 - beta1^t) * exp_avg / (sqrt(exp_avg_sq) / sqrt(1 - beta2^t) + eps)

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

#include "titan/optim/optimizer.h"

namespace titan::optim {
namespace {

enum class WeightDecay {
  InGradient,  ///< Adam
  Decoupled,   ///< AdamW
};

// The factors of the bias correction for a parameter's step, computed in double.
struct Corrections {
  double step_size = 0;    // lr / (1 - beta1^t)
  double denominator = 0;  // sqrt(1 - beta2^t)
};

Corrections corrections(const at::Tensor& step, double lr, const OptimizerSettings& settings) {
  const double t = *step.const_data_ptr<float>();
  return {lr / (1 - std::pow(settings.beta1, t)), std::sqrt(1 - std::pow(settings.beta2, t))};
}

void fused_step(WeightDecay decay, const OptimizerSettings& settings, const Update& update) {
  // LibTorch's kernels divide by the scale, and write the gradients back.
  std::optional<at::Tensor> grad_scale;
  if (update.grad_factor.defined()) grad_scale = update.grad_factor.reciprocal().to(at::kFloat);
  const auto call = [&](auto kernel, const auto& lr) {
    kernel(update.params, update.grads, update.state[0], update.state[1], /*max_exp_avg_sqs=*/{},
           update.steps, lr, settings.beta1, settings.beta2, settings.weight_decay, settings.eps,
           /*amsgrad=*/false, /*maximize=*/false, grad_scale,
           /*found_inf=*/update.skip.defined() ? std::optional(update.skip) : std::nullopt);
  };
  const bool decoupled = decay == WeightDecay::Decoupled;
  if (update.lr_on_device.defined())
    call(decoupled ? at::_ops::_fused_adamw__tensor_lr::call : at::_ops::_fused_adam__tensor_lr::call,
         update.lr_on_device);
  else
    call(decoupled ? at::_ops::_fused_adamw_::call : at::_ops::_fused_adam_::call, update.lr);
  // LibTorch's fused kernels don't raise version counters, which sharding needs to detect that its copies are
  // stale.
  for (const at::Tensor& param : update.params) param.unsafeGetTensorImpl()->bump_version();
}

void foreach_step(WeightDecay decay, const OptimizerSettings& settings, const Update& update) {
  const auto& exp_avgs = update.state[0];
  const auto& exp_avg_sqs = update.state[1];
  std::vector<at::Tensor> grads = update.grads;
  if (settings.weight_decay != 0 && decay == WeightDecay::Decoupled) {
    at::_foreach_mul_(update.params, 1 - update.lr * settings.weight_decay);
  } else if (settings.weight_decay != 0) {
    grads = at::_foreach_add(grads, update.params, settings.weight_decay);
  }
  at::_foreach_lerp_(exp_avgs, grads, 1 - settings.beta1);
  at::_foreach_mul_(exp_avg_sqs, settings.beta2);
  at::_foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - settings.beta2);

  std::vector<at::Scalar> step_sizes, denominators;
  for (const at::Tensor& step : update.steps) {
    const auto [step_size, denominator] = corrections(step, update.lr, settings);
    step_sizes.emplace_back(-step_size);
    denominators.emplace_back(denominator);
  }
  std::vector<at::Tensor> roots = at::_foreach_sqrt(exp_avg_sqs);
  at::_foreach_div_(roots, denominators);
  at::_foreach_add_(roots, settings.eps);
  at::_foreach_addcdiv_(update.params, exp_avgs, roots, step_sizes);
}

void for_loop_step(WeightDecay decay, const OptimizerSettings& settings, const Update& update) {
  for (size_t i = 0; i < update.params.size(); ++i) {
    at::Tensor param = update.params[i], grad = update.grads[i];
    at::Tensor exp_avg = update.state[0][i], exp_avg_sq = update.state[1][i];
    if (settings.weight_decay != 0 && decay == WeightDecay::Decoupled) {
      param.mul_(1 - update.lr * settings.weight_decay);
    } else if (settings.weight_decay != 0) {
      grad = grad.add(param, settings.weight_decay);
    }
    exp_avg.lerp_(grad, 1 - settings.beta1);
    exp_avg_sq.mul_(settings.beta2).addcmul_(grad, grad, 1 - settings.beta2);
    const auto [step_size, denominator] = corrections(update.steps[i], update.lr, settings);
    param.addcdiv_(exp_avg, exp_avg_sq.sqrt().div_(denominator).add_(settings.eps), -step_size);
  }
}

// Whether the step is LibTorch's kernel for GPUs, and computes in fp32: all dtypes but float64.
bool is_fused_in_fp32(const OptimizerSettings& settings, const at::Tensor& param) {
  return settings.implementation == "fused" && param.is_cuda() && param.scalar_type() != at::kDouble;
}

OptimizerSpec with_decay(WeightDecay decay) {
  return OptimizerRule<OptimizerSettings>{
      .state = {"exp_avg", "exp_avg_sq"},
      .step =
          [decay](const OptimizerSettings& settings, const Update& update) {
            const auto step = settings.implementation == "fused"     ? fused_step
                              : settings.implementation == "foreach" ? foreach_step
                                                                     : for_loop_step;
            step(decay, settings, update);
          },
      .runs_on_device =
          [](const OptimizerSettings& settings) {
            const std::string& name = settings.implementation;
            TITAN_CHECK(name == "fused" || name == "foreach" || name == "for-loop",
                        "optimizer.implementation: unknown '", name, "'; known: for-loop foreach fused");
            return name == "fused";
          },
      // The scale is fp32, which is too coarse for float64. On a CPU one more pass costs little, and its numbers are those of clipping
      // before the step.
      .takes_grad_factor = is_fused_in_fp32,
      // Such kernels round the host's learning rate to fp32, too.
      .takes_lr_on_device = is_fused_in_fp32};
}

}  // namespace

Registry<OptimizerSpec>& optimizers() {
  static Registry<OptimizerSpec>& registry = *[] {
    auto* made = new Registry<OptimizerSpec>("optimizer");
    made->add("AdamW", with_decay(WeightDecay::Decoupled));
    made->add("Adam", with_decay(WeightDecay::InGradient));
    return made;
  }();
  return registry;
}

}  // namespace titan::optim

// [Note: Adam]
// Kingma and Ba, 2015; with decoupled decay, Loshchilov and Hutter, 2019. The order of operations is
// torch.optim's, so that each implementation rounds as the one of the same name there:
//   exp_avg <- lerp(exp_avg, grad, 1 - beta1);  exp_avg_sq <- beta2 exp_avg_sq + (1 - beta2) grad^2
//   param <- param - lr / (1 - beta1^t) * exp_avg / (sqrt(exp_avg_sq) / sqrt(1 - beta2^t) + eps)
// States in another dtype than their parameter's, and stochastic rounding, are titan::adam_'s, which has the same formula
// ([Note: the arithmetic of titan::adam_] in src/ops/adam_formula.h).

#include <algorithm>
#include <array>
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

#include "core/hash.h"
#include "ops/operators.h"
#include "titan/core/error.h"
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

at::ScalarType state_dtype(const OptimizerSettings& settings, at::ScalarType of_param) {
  if (!settings.state_dtype) return of_param;
  return *settings.state_dtype == "bfloat16" ? at::kBFloat16 : at::kFloat;
}

// Whether titan::adam_ steps parameters of this dtype, and not LibTorch's kernel.
bool is_own_step(const OptimizerSettings& settings, at::ScalarType of_param) {
  return settings.stochastic_rounding || state_dtype(settings, of_param) != of_param;
}

// The key of a parameter's random numbers, and the places of its local elements in the whole parameter, as titan::adam_ takes them: rows,
// each adjacent in the whole parameter.
std::array<int64_t, 4> place_of(const OptimizerSettings& settings, const Parameter& parameter) {
  const DTensor& data = parameter.data;
  const int64_t count = data.local.numel();
  if (!settings.stochastic_rounding || count == 0) return {0, 0, std::max<int64_t>(count, 1), 0};
  struct Dim {
    int64_t length, stride;
  };
  std::vector<Dim>
      dims;  // the dimensions of the local part, inner ones first; joined where elements have one distance
  int64_t first = 0, stride = 1;
  for (size_t i = data.global_shape.size(); i-- > 0; stride *= data.global_shape[i]) {
    const int64_t length = data.box.length[i];
    first += data.box.offset[i] * stride;
    if (length == 1) continue;
    if (!dims.empty() && dims.back().stride * dims.back().length == stride)
      dims.back().length *= length;
    else
      dims.push_back({length, stride});
  }
  if (dims.empty() || dims[0].stride != 1) dims.insert(dims.begin(), {1, 1});
  TITAN_CHECK(dims.size() <= 2, "optimizer.stochastic_rounding: parameter '", parameter.name, "' of ",
              at::IntArrayRef(data.global_shape), " is cut along more than one dimension after its first, ",
              "which isn't supported");
  const uint64_t key = hash_bytes(parameter.name, settings.seed);
  return {static_cast<int64_t>(key), first, dims[0].length, dims.size() > 1 ? dims[1].stride : 0};
}

void own_step(WeightDecay decay, const OptimizerSettings& settings, const Update& update) {
  static const auto op = ops::find_operator<decltype(ops::composite::adam_)>("titan::adam_");
  std::vector<int64_t> places;
  for (const Parameter* parameter : update.parameters) {
    const auto place = place_of(settings, *parameter);
    places.insert(places.end(), place.begin(), place.end());
  }
  const auto optional = [](const at::Tensor& x) { return x.defined() ? std::optional(x) : std::nullopt; };
  // Rounded to fp32, as LibTorch's kernels do, so that both forms of the rate give the same bits.
  const auto lr = static_cast<double>(static_cast<float>(update.lr));
  op.call(update.params, update.grads, update.state[0], update.state[1], update.steps, places, lr,
          settings.beta1, settings.beta2, settings.weight_decay, settings.eps,
          decay == WeightDecay::Decoupled, settings.stochastic_rounding, optional(update.grad_factor),
          optional(update.skip), optional(update.lr_on_device));
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

// Whether the step reads a factor of the gradients and a learning rate from the device's memory: titan::adam_, and LibTorch's kernel for
// GPUs. That one computes with both in fp32, which is too coarse for float64. On CPUs it reads neither: one more pass costs little there.
bool reads_device_numbers(const OptimizerSettings& settings, const at::Tensor& param) {
  return is_own_step(settings, param.scalar_type()) ||
         (settings.implementation == "fused" && param.is_cuda() && param.scalar_type() != at::kDouble);
}

OptimizerSpec with_decay(WeightDecay decay) {
  return OptimizerRule<OptimizerSettings>{
      .state = {"exp_avg", "exp_avg_sq"},
      .step =
          [decay](const OptimizerSettings& settings, const Update& update) {
            const auto step = is_own_step(settings, update.params[0].scalar_type()) ? own_step
                              : settings.implementation == "fused"                  ? fused_step
                              : settings.implementation == "foreach"                ? foreach_step
                                                                                    : for_loop_step;
            step(decay, settings, update);
          },
      .runs_on_device =
          [](const OptimizerSettings& settings) {
            const std::string& name = settings.implementation;
            TITAN_CHECK(name == "fused" || name == "foreach" || name == "for-loop",
                        "optimizer.implementation: unknown '", name, "'; known: for-loop foreach fused");
            if (name != "fused" && (settings.state_dtype || settings.stochastic_rounding))
              throw ConfigError(str("optimizer.implementation = \"", name,
                                    "\" can't be combined with optimizer.state_dtype or "
                                    "optimizer.stochastic_rounding, which need \"fused\""));
            return name == "fused";
          },
      .takes_grad_factor = reads_device_numbers,
      .takes_lr_on_device = reads_device_numbers,
      .state_dtype = state_dtype};
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

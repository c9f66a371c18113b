#include "parallel/tensor/tensor_hooks.h"

#include <algorithm>

#include <torch/nn/module.h>

#include "titan/core/error.h"

namespace titan::tp {

void ConversionHook::convert(nn::HookHost& host, const nn::TensorRefs& tensors, const char* what) const {
  size_t number = 0, converted = 0;
  for (at::Tensor* tensor : tensors) {
    if (!tensor->is_floating_point() || tensor->dim() == 0) continue;
    if (std::find(tensors_.begin(), tensors_.end(), number++) == tensors_.end()) continue;
    *tensor = conversion_(*tensor);
    ++converted;
  }
  // A loss and integers have nothing to convert; numbers beyond what the call has are a mistake in the plan.
  TITAN_CHECK(number == 0 || converted == tensors_.size(),
              "tensor parallel: the plan converts floating-point ", what, " number ", tensors_.back(),
              " of module '", host.fqn(), "', whose call has ", number);
}

void sum_gradient(nn::HookHost& host, const at::Tensor& param, std::shared_ptr<const TpGroup> group,
                  const char* module) {
  const std::weak_ptr<torch::nn::Module> owner = host.as_module().weak_from_this();
  const auto sum = [owner, group = std::move(group), module](const at::Tensor& gradient) {
    TITAN_CHECK(
        !at::GradMode::is_enabled(), "the gradient of module '", module,
        "' over tensor-parallel ranks has no second derivative: call backward with create_graph = false");
    const auto alive = owner.lock();
    const auto* host = dynamic_cast<const nn::HookHost*>(alive.get());
    if (host && host->param_owner) return gradient;
    return group->all_reduce(gradient, {"tp::gradient", module});
  };
  // A frozen one may thaw later.
  const bool trainable = param.requires_grad();
  at::Tensor(param).set_requires_grad(true);
  param.register_hook(sum);
  at::Tensor(param).set_requires_grad(trainable);
}

}  // namespace titan::tp

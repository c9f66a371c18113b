#include "parallel/tensor/tensor_hooks.h"

#include <algorithm>

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
  if (!param.requires_grad()) return;
  // The parameter lives no longer than its module.
  param.register_hook([&host, group = std::move(group), module](const at::Tensor& gradient) {
    if (host.param_owner) return gradient;
    at::NoGradGuard no_grad;
    return group->all_reduce(gradient, {"tp::gradient", module});
  });
}

}  // namespace titan::tp

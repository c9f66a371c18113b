#include "titan/nn/hooks.h"

#include <torch/nn/module.h>

#include "titan/core/error.h"

namespace titan::nn {

void CallHook::pre_forward(HookHost& /*host*/, const TensorRefs& /*inputs*/) {}
void CallHook::post_forward(HookHost& /*host*/, const TensorRefs& /*outputs*/) {}

void HookHost::reset_buffers(const at::Device& /*device*/) {}

bool HookHost::set_grad_sink(std::string_view /*name*/, std::shared_ptr<ops::GradSink> /*sink*/) {
  return false;
}

void HookHost::check_entered_through_ref() const {
  TITAN_CHECK(depth_ > 0 || !is_wrapped(), "module '", fqn_,
              "' is wrapped (fully_shard, parallelize, ...) but was entered by another road than "
              "titan::nn::Ref: call it through its holder, not impl->forward() or torch::nn::Sequential");
}

void HookHost::refuse_if_wrapped(const char* operation) const {
  TITAN_CHECK(!is_wrapped() && !param_owner, operation, "() on module '", fqn_,
              "' after it was wrapped would replace what the wrapper holds; do it before");
}

void name_modules(torch::nn::Module& root) {
  for (const auto& named : root.named_modules(/*name_prefix=*/"", /*include_self=*/false))
    if (auto* host = dynamic_cast<HookHost*>(named.value().get())) host->set_fqn(named.key());
}

}  // namespace titan::nn

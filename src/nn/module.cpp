#include "titan/nn/module.h"

#include <torch/nn/module.h>

#include "tensor/param_storage.h"
#include "titan/core/error.h"
#include "titan/nn/hooks.h"

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

namespace {

// What has sizes only can't be copied, and a parameter can't change its device and stay the same object.
void refuse_if_deferred(const torch::nn::Module& module, const HookHost& host, const char* operation) {
  for (const at::Tensor& parameter : module.parameters(/*recurse=*/false))
    TITAN_CHECK(!is_deferred(parameter), operation, "() on module '", host.fqn(),
                "', whose parameters have no memory yet: construct it where and as it is to be, or "
                "materialize() it first");
}

}  // namespace

void Module::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  refuse_if_wrapped("to");
  refuse_if_deferred(*this, *this, "to");
  torch::nn::Module::to(device, dtype, non_blocking);
}
void Module::to(torch::Dtype dtype, bool non_blocking) {
  refuse_if_wrapped("to");
  refuse_if_deferred(*this, *this, "to");
  torch::nn::Module::to(dtype, non_blocking);
}
void Module::to(torch::Device device, bool non_blocking) {
  refuse_if_wrapped("to");
  refuse_if_deferred(*this, *this, "to");
  torch::nn::Module::to(device, non_blocking);
}
std::shared_ptr<torch::nn::Module> Module::clone(const std::optional<torch::Device>& device) const {
  refuse_if_wrapped("clone");
  return torch::nn::Module::clone(device);
}

at::Tensor Module::register_init_parameter(const std::string& name, at::IntArrayRef sizes, const Init& init,
                                           const Construct& construct) {
  at::Tensor parameter =
      deferred_tensor(sizes, at::TensorOptions().dtype(construct.dtype).device(construct.device));
  if (!construct.deferred) {
    param_storage::allocate(parameter);
    const Box whole{std::vector<int64_t>(sizes.size(), 0), sizes.vec()};
    if (!parameter.is_meta()) fill(parameter, init, /*seed=*/0, name, sizes, whole);
  }
  param_inits_.push_back({name, init});
  return register_parameter(name, parameter);
}

}  // namespace titan::nn

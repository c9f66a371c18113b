#include "titan/nn/module.h"

#include "titan/core/error.h"
#include "titan/tensor/param_storage.h"

namespace titan::nn {

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

#include "parallel/activation_checkpoint/module_inputs.h"

#include "titan/core/error.h"

namespace titan::activations {

using nn::TensorList;

ModuleInputs::ModuleInputs(const TensorList& inputs, const std::string& module) : module_(module) {
  inputs_.reserve(inputs.size());
  for (const at::Tensor& input : inputs)
    inputs_.push_back({torch::autograd::SavedVariable(input, /*is_output=*/false), input._version()});
}

void ModuleInputs::check_unwritten(const TensorList& inputs) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i]._version() == inputs_[i].version) continue;
    inputs_.clear();
    refuse_written(i);
  }
}

TensorList ModuleInputs::detached() const {
  TensorList inputs;
  inputs.reserve(inputs_.size());
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const auto here = inputs_[i].saved.get_raw_data();  // empty under another checkpoint, which computes it
    if (here && here->_version() != inputs_[i].version) refuse_written(i);
    const at::Tensor input = inputs_[i].saved.unpack();
    inputs.push_back(input.detach());
    inputs.back().set_requires_grad(input.requires_grad());
  }
  return inputs;
}

void ModuleInputs::refuse_written(size_t number) const {
  throw Error(str("input ", number, " of '", module_,
                  "' was written to after the call began, but a checkpointed module is called with it again: "
                  "use an operation that isn't in place"));
}

at::Device compute_device(const TensorList& inputs) {
  for (const at::Tensor& input : inputs)
    if (!input.is_cpu()) return input.device();
  return at::kCPU;
}

}  // namespace titan::activations

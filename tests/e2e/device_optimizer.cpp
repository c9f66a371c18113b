// An optimizer that runs on the device and takes its learning rate from the host: the optimizer's part of a step isn't recorded
// as a CUDA graph.

#include <ATen/ATen.h>

#include "titan/optim/optimizer.h"

namespace {

using titan::optim::OptimizerSettings;

void step(const OptimizerSettings& /*settings*/, const titan::optim::Update& update) {
  for (size_t i = 0; i < update.params.size(); ++i) {
    const at::Tensor moved = update.params[i].sub(update.grads[i], update.lr);
    at::Tensor param = update.params[i];
    param.copy_(update.skip.defined() ? at::where(update.skip.eq(1), param, moved) : moved);
  }
}

}  // namespace

extern "C" void titan_register() {
  titan::optim::optimizers().add(
      "device_sgd", titan::optim::OptimizerRule<OptimizerSettings>{
                        .step = step, .runs_on_device = [](const OptimizerSettings&) { return true; }});
}

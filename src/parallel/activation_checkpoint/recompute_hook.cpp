#include "parallel/activation_checkpoint/recompute_hook.h"

#include <ATen/core/grad_mode.h>

namespace titan::activations {

nn::TensorList RecomputeHook::call(nn::HookHost& host, const nn::TensorList& inputs, Run run) {
  if (!at::GradMode::is_enabled()) return run(inputs);
  const auto frame = std::make_shared<RecomputeFrame>(host, inputs, std::move(run), options_,
                                                      RecomputeFrame::Parts{products_, nullptr});
  return frame->forward(inputs);
}

}  // namespace titan::activations

#pragma once

// A module whose forward each test writes itself.

#include <functional>
#include <string>

#include <ATen/ATen.h>

#include "titan/nn/module.h"
#include "titan/parallel/activation_checkpoint.h"

namespace titan::testing {

class LambdaImpl : public nn::Module {
 public:
  using Body = std::function<at::Tensor(LambdaImpl&, const at::Tensor&)>;
  explicit LambdaImpl(Body body) : body_(std::move(body)) {
    weight = register_parameter("weight", at::linspace(-1, 1, 16).view({4, 4}));
    frozen = register_parameter("frozen", at::linspace(1, 2, 4), /*requires_grad=*/false);
  }
  at::Tensor forward(const at::Tensor& x) { return body_(*this, x); }
  at::Tensor weight, frozen;
  int calls = 0;
  at::Tensor kept;  // for a body to keep between calls

 private:
  Body body_;
};
TITAN_MODULE(Lambda);

inline Lambda checkpointed(LambdaImpl::Body body, const ActivationCheckpointOptions& options = {},
                           const ModulePolicy& policy = FullRecompute{}) {
  Lambda module(std::move(body));
  module->set_fqn("layers.7");
  checkpoint_activations(module, policy, options);
  return module;
}

struct Gradients {
  at::Tensor x, weight;
};

inline Gradients gradients_of(const Lambda& module, bool x_needs_grad = true, int calls = 1) {
  module->weight.mutable_grad().reset();
  at::Tensor x = at::linspace(-1, 1, 12).view({3, 4}).set_requires_grad(x_needs_grad);
  at::Tensor y = x;
  for (int i = 0; i < calls; ++i) y = module(y);
  y.sum().backward();
  return {x.grad(), module->weight.grad()};
}

inline std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace titan::testing

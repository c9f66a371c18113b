#include "titan/nn/feed_forward.h"

#include "titan/ops/swiglu.h"

namespace titan::nn {

FeedForwardImpl::FeedForwardImpl(const FeedForwardOptions& options) : w1(nullptr), w2(nullptr), w3(nullptr) {
  const LinearOptions gate{.init = options.gate_init, .construct = options.construct};
  const LinearOptions output{.init = options.output_init, .construct = options.construct};
  w1 = register_module("w1", Linear(options.dim, options.hidden_dim, gate));
  w2 = register_module("w2", Linear(options.hidden_dim, options.dim, output));
  w3 = register_module("w3", Linear(options.dim, options.hidden_dim, output));
}

at::Tensor FeedForwardImpl::forward(const at::Tensor& x) {
  check_entered_through_ref();
  const std::vector<at::Tensor> gate_and_up = linears(x, {&w1, &w3});
  return w2(ops::swiglu(gate_and_up[0], gate_and_up[1]));
}

}  // namespace titan::nn

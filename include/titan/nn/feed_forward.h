#pragma once

#include <cstdint>

#include "titan/nn/linear.h"

namespace titan::nn {

struct FeedForwardOptions {
  int64_t dim = 0;
  int64_t hidden_dim = 0;
  Init gate_init;    ///< of w1
  Init output_init;  ///< of w2 and w3
  Construct construct = {};
};

/// w2(silu(w1 x) * w3 x). x: [..., dim]; result the same.
class FeedForwardImpl : public Module {
 public:
  explicit FeedForwardImpl(const FeedForwardOptions& options);
  at::Tensor forward(const at::Tensor& x);

  Linear w1, w2, w3;
};
TITAN_MODULE(FeedForward);

}  // namespace titan::nn

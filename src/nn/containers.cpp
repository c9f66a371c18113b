#include "titan/nn/containers.h"

namespace titan::nn {

at::Tensor SequentialImpl::forward(const at::Tensor& x) {
  check_entered_through_ref();
  at::Tensor y = x;
  for (const auto& call : calls_) y = call(y);
  return y;
}

}  // namespace titan::nn

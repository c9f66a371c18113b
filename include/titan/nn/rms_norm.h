#pragma once

#include <cstdint>
#include <memory>

#include "titan/nn/module.h"
#include "titan/nn/ref.h"

namespace titan::nn {

/// x / sqrt(mean(x^2) + eps) * weight over the last dimension. x: [..., dim]; weight: [dim], ones at first.
class RMSNormImpl : public Module {
 public:
  RMSNormImpl(int64_t dim, double eps = 1e-5, const Construct& construct = {});
  at::Tensor forward(const at::Tensor& x);

  bool set_grad_sink(std::string_view name, std::shared_ptr<ops::GradSink> sink) override;

  at::Tensor weight;

 private:
  double eps_;
  std::shared_ptr<ops::GradSink> weight_sink_;
};
TITAN_MODULE(RMSNorm);

}  // namespace titan::nn

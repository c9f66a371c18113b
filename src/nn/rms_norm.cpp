#include "titan/nn/rms_norm.h"

#include "titan/ops/rms_norm.h"

namespace titan::nn {

RMSNormImpl::RMSNormImpl(int64_t dim, double eps, const Construct& construct) : eps_(eps) {
  weight = register_init_parameter("weight", {dim}, Init::constant(1), construct);
}

at::Tensor RMSNormImpl::forward(const at::Tensor& x) {
  check_entered_through_ref();
  return ops::rms_norm(x, weight, eps_, weight_sink_);
}

bool RMSNormImpl::set_grad_sink(std::string_view name, std::shared_ptr<ops::GradSink> sink) {
  if (name != "weight") return false;
  weight_sink_ = std::move(sink);
  return true;
}

}  // namespace titan::nn

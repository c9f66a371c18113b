#include "titan/nn/linear_cross_entropy.h"

#include "titan/core/error.h"
#include "titan/ops/linear.h"
#include "titan/ops/linear_cross_entropy.h"

namespace titan::nn {

LinearCrossEntropyImpl::LinearCrossEntropyImpl(int64_t dim, int64_t vocab_size,
                                               const LossHeadOptions& options)
    : chunk_bytes_(options.chunk_bytes), products_(ops::default_products()) {
  if (!options.tied_weight.defined()) {
    weight = register_init_parameter("weight", {vocab_size, dim}, options.init, options.construct);
    return;
  }
  TITAN_CHECK(options.tied_weight.sizes() == at::IntArrayRef({vocab_size, dim}),
              "the loss head wants a weight of [", vocab_size, ", ", dim, "], the tied one is ",
              options.tied_weight.sizes());
  weight = register_parameter("weight", options.tied_weight);
  param_inits_.push_back({"weight", options.init});
}

at::Tensor LinearCrossEntropyImpl::forward(const at::Tensor& hidden) {
  check_entered_through_ref();
  return ops::linear(hidden, weight, /*bias=*/{}, products_, weight_sink_);
}

at::Tensor LinearCrossEntropyImpl::forward(const at::Tensor& hidden, const at::Tensor& labels,
                                           int64_t global_valid_tokens) {
  check_entered_through_ref();
  return ops::linear_cross_entropy(hidden, weight, labels,
                                   {.global_valid_tokens = global_valid_tokens,
                                    .chunk_bytes = chunk_bytes_,
                                    .products = products_,
                                    .weight_sink = weight_sink_});
}

bool LinearCrossEntropyImpl::set_grad_sink(std::string_view name, std::shared_ptr<ops::GradSink> sink) {
  if (name != "weight") return false;
  weight_sink_ = std::move(sink);
  return true;
}

}  // namespace titan::nn

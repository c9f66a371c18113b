#include "titan/nn/loss.h"

#include "titan/core/error.h"
#include "titan/ops/linear.h"
#include "titan/ops/loss.h"
#include "titan/tensor/placement.h"

namespace titan::nn {

LinearCrossEntropyImpl::LinearCrossEntropyImpl(int64_t dim, int64_t vocab_size,
                                               const LossHeadOptions& options)
    : vocab_size_(vocab_size), chunk_bytes_(options.chunk_bytes), products_(ops::default_products()) {
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
                                    .weight_sink = weight_sink_,
                                    .part = part_});
}

std::vector<ParamSplit> LinearCrossEntropyImpl::param_splits(Split split) const {
  TITAN_CHECK(split == Split::Columns, "the loss head '", fqn(),
              "' can be split by columns (its vocabulary) only");
  return {{"weight", 0}};
}

void LinearCrossEntropyImpl::set_split(Split /*split*/, std::shared_ptr<const ops::RankParts> parts) {
  const Chunk rows = chunk_of(vocab_size_, parts->count(), parts->index());
  part_ = {.first = rows.offset, .size = vocab_size_, .parts = std::move(parts)};
}

bool LinearCrossEntropyImpl::set_grad_sink(std::string_view name, std::shared_ptr<ops::GradSink> sink) {
  if (name != "weight") return false;
  weight_sink_ = std::move(sink);
  return true;
}

}  // namespace titan::nn

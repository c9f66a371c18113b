#include "titan/nn/embedding.h"

#include "titan/ops/embedding.h"

namespace titan::nn {

EmbeddingImpl::EmbeddingImpl(int64_t num_embeddings, int64_t dim, const Construct& construct,
                             const Init& init) {
  weight = register_init_parameter("weight", {num_embeddings, dim}, init, construct);
}

at::Tensor EmbeddingImpl::forward(const at::Tensor& tokens) {
  check_entered_through_ref();
  return ops::embedding(weight, tokens, weight_sink_);
}

bool EmbeddingImpl::set_grad_sink(std::string_view name, std::shared_ptr<ops::GradSink> sink) {
  if (name != "weight") return false;
  weight_sink_ = std::move(sink);
  return true;
}

}  // namespace titan::nn

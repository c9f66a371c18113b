#include "titan/nn/embedding.h"

#include "titan/ops/embedding.h"
#include "titan/tensor/placement.h"

namespace titan::nn {

EmbeddingImpl::EmbeddingImpl(int64_t num_embeddings, int64_t dim, const Construct& construct,
                             const Init& init)
    : num_embeddings_(num_embeddings) {
  weight = register_init_parameter("weight", {num_embeddings, dim}, init, construct);
}

at::Tensor EmbeddingImpl::forward(const at::Tensor& tokens) {
  check_entered_through_ref();
  return ops::embedding(weight, tokens, weight_sink_, part_);
}

std::vector<ParamSplit> EmbeddingImpl::param_splits(Split split) const {
  return {{"weight", split == Split::Rows ? 0 : 1}};
}

void EmbeddingImpl::set_split(Split split, std::shared_ptr<const ops::RankParts> parts) {
  if (split == Split::Columns) return;
  const Chunk rows = chunk_of(num_embeddings_, parts->count(), parts->index());
  part_ = {.first = rows.offset, .size = num_embeddings_, .parts = std::move(parts)};
}

bool EmbeddingImpl::set_grad_sink(std::string_view name, std::shared_ptr<ops::GradSink> sink) {
  if (name != "weight") return false;
  weight_sink_ = std::move(sink);
  return true;
}

}  // namespace titan::nn

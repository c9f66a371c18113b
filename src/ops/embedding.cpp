#include "titan/ops/embedding.h"

#include <ATen/ops/embedding.h>

#include "ops/autograd_node.h"
#include "ops/operators.h"

namespace titan::ops {

namespace {

struct EmbeddingBackward final : BackwardNode {
  at::Tensor tokens;
  int64_t num_embeddings = 0;
  at::ScalarType dtype = at::kFloat;
  std::shared_ptr<GradSink> weight_sink;

  variable_list backward(const at::Tensor& grad) override {
    using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, int64_t);
    static const auto op = find_operator<Signature>("titan::embedding_backward");
    const at::Tensor grad_weight = op.call(grad, tokens, num_embeddings);
    if (!weight_sink) return {grad_weight.to(dtype)};
    weight_sink->accept(grad_weight, {});
    return {at::Tensor()};
  }
  void release_variables() override { tokens.reset(); }
  std::string name() const override { return "titan::embedding backward"; }
};

}  // namespace

at::Tensor embedding(const at::Tensor& weight_VD, const at::Tensor& tokens,
                     const std::shared_ptr<GradSink>& weight_sink) {
  TITAN_CHECK(weight_VD.dim() == 2, "embedding: expected a weight of [vocabulary, size], got ",
              weight_VD.sizes());
  TITAN_CHECK(tokens.scalar_type() == at::kLong, "embedding: expected int64 tokens, got ",
              tokens.scalar_type());
  at::Tensor out;
  {
    BelowAutograd guard;
    out = at::embedding(weight_VD, tokens);
  }
  if (!compute_requires_grad(weight_VD)) return out;
  const auto node = record<EmbeddingBackward>(out, weight_VD);
  node->tokens = tokens;
  node->num_embeddings = weight_VD.size(0);
  node->dtype = weight_VD.scalar_type();
  node->weight_sink = weight_sink;
  return out;
}

}  // namespace titan::ops

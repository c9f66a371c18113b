#include "titan/ops/embedding.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/zeros.h>

#include "ops/autograd_node.h"
#include "ops/composite.h"
#include "ops/operators.h"

namespace titan::ops {

namespace {

at::Tensor weight_gradient(const at::Tensor& grad, const at::Tensor& tokens, const at::Tensor& foreign,
                           int64_t num_embeddings) {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, int64_t);
  static const auto op = find_operator<Signature>("titan::embedding_backward");
  if (num_embeddings == 0)
    return at::zeros({0, grad.size(-1)}, grad.options().dtype(composite::accumulate_type(grad)));
  const at::Tensor own = foreign.defined() ? grad.masked_fill(foreign.unsqueeze(-1), 0) : grad;
  return op.call(own, tokens, num_embeddings);
}

struct EmbeddingBackward final : BackwardNode {
  at::Tensor tokens;
  at::Tensor foreign;  // tokens of other parts; undefined where the vocabulary is whole
  int64_t num_embeddings = 0;
  at::ScalarType dtype = at::kFloat;
  std::shared_ptr<GradSink> weight_sink;

  variable_list backward(const at::Tensor& grad) override {
    if (!weight_sink) return {weight_gradient(grad, tokens, foreign, num_embeddings).to(dtype)};
    weight_sink->accept(
        {.compute = [grad, tokens = tokens, foreign = foreign,
                     rows = num_embeddings] { return weight_gradient(grad, tokens, foreign, rows); },
         .reads = {grad, tokens, foreign}});
    return {at::Tensor()};
  }
  void release_variables() override {
    tokens.reset();
    foreign.reset();
  }
  std::string name() const override { return "titan::embedding backward"; }
};

struct Lookup {
  at::Tensor rows;     // of the weight
  at::Tensor foreign;  // where the row is another part's, and 0 stands in its place
};

Lookup local_lookup(const at::Tensor& tokens, const VocabularyPart& part, int64_t num_rows) {
  const at::Tensor wrong = tokens.lt(0) | tokens.ge(part.size);
  if (tokens.is_cuda()) at::_assert_async(wrong.any().logical_not());
  if (tokens.is_cpu() && tokens.numel() > 0) {
    TITAN_CHECK(!wrong.any().item<bool>(), "embedding: token ",
                tokens.masked_select(wrong)[0].item<int64_t>(), " isn't in a vocabulary of ", part.size);
  }
  const at::Tensor rows = tokens - part.first;
  const at::Tensor foreign = rows.lt(0) | rows.ge(num_rows);
  return {rows.masked_fill(foreign, 0), foreign};
}

std::vector<int64_t> output_sizes(at::IntArrayRef sizes, int64_t last) {
  std::vector<int64_t> result = sizes.vec();
  result.push_back(last);
  return result;
}

}  // namespace

at::Tensor embedding(const at::Tensor& weight_VD, const at::Tensor& tokens,
                     const std::shared_ptr<GradSink>& weight_sink, const VocabularyPart& part) {
  TITAN_CHECK(weight_VD.dim() == 2, "embedding: expected a weight of [vocabulary, size], got ",
              weight_VD.sizes());
  TITAN_CHECK(tokens.scalar_type() == at::kLong, "embedding: expected int64 tokens, got ",
              tokens.scalar_type());
  Lookup lookup{tokens, {}};
  at::Tensor out;
  {
    BelowAutograd guard;
    if (part.parts) lookup = local_lookup(tokens, part, weight_VD.size(0));
    out = weight_VD.size(0) > 0
              ? at::embedding(weight_VD, lookup.rows)
              : at::zeros(output_sizes(tokens.sizes(), weight_VD.size(1)), weight_VD.options());
    if (lookup.foreign.defined()) out.masked_fill_(lookup.foreign.unsqueeze(-1), 0);
  }
  if (!compute_requires_grad(weight_VD)) return out;
  const auto node = record<EmbeddingBackward>(out, weight_VD);
  node->tokens = lookup.rows;
  node->foreign = lookup.foreign;
  node->num_embeddings = weight_VD.size(0);
  node->dtype = weight_VD.scalar_type();
  node->weight_sink = weight_sink;
  return out;
}

}  // namespace titan::ops

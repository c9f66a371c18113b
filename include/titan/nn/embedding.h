#pragma once

#include <cstdint>
#include <memory>

#include "titan/nn/module.h"
#include "titan/nn/ref.h"
#include "titan/nn/splittable.h"

namespace titan::nn {

/// Rows of weight [num_embeddings, dim] by token. tokens: int64 [...]; result: [..., dim]. The default
/// distribution is N(0, 1).
class EmbeddingImpl : public Module, public Splittable {
 public:
  EmbeddingImpl(int64_t num_embeddings, int64_t dim, const Construct& construct = {},
                const Init& init = Init::normal(0, 1));
  at::Tensor forward(const at::Tensor& tokens);

  bool backward_reads_parameters() const override { return false; }
  bool set_grad_sink(std::string_view name, std::shared_ptr<ops::GradSink> sink) override;

  /// Rows: a part of the vocabulary each, and zeros for tokens of other ranks. Columns: a part of `dim`.
  std::vector<ParamSplit> param_splits(Split split) const override;
  void set_split(Split split, std::shared_ptr<const ops::RankParts> parts) override;

  at::Tensor weight;

 private:
  int64_t num_embeddings_;
  ops::VocabularyPart part_;
  std::shared_ptr<ops::GradSink> weight_sink_;
};
TITAN_MODULE(Embedding);

}  // namespace titan::nn

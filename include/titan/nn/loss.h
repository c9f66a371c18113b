#pragma once

#include <cstdint>
#include <memory>

#include "titan/nn/linear.h"

namespace titan::nn {

struct LossHeadOptions {
  Init init;
  at::Tensor tied_weight = {};  ///< the embedding's [vocab, dim], for models that share it
  int64_t chunk_bytes =
      64 * 1024 * 1024;  ///< of the logits that exist at one time while the loss is computed
  Construct construct = {};
};

/// The model's last layer and its loss in one call: hidden states become logits, or with labels the loss,
/// whose logits never exist whole.
class LinearCrossEntropyImpl : public Module, public ProductsUser, public Splittable {
 public:
  LinearCrossEntropyImpl(int64_t dim, int64_t vocab_size, const LossHeadOptions& options);

  /// hidden: [..., dim]; logits: [..., vocab], in hidden's dtype.
  at::Tensor forward(const at::Tensor& hidden);
  /// labels: int64 [...], -100 doesn't count. The sum of this batch's token losses over
  /// `global_valid_tokens`, the number of labels that count in the whole optimizer step (0: the loss is 0): a
  /// scalar in fp32, or float64 of a float64 model.
  at::Tensor forward(const at::Tensor& hidden, const at::Tensor& labels, int64_t global_valid_tokens);

  void set_products(std::shared_ptr<const ops::Products> products) override {
    products_ = std::move(products);
  }
  bool set_grad_sink(std::string_view name, std::shared_ptr<ops::GradSink> sink) override;

  /// Columns only: a part of the vocabulary each. The loss is whole on every rank (loss parallel), the hidden
  /// states' gradient a summand; the call without labels gives this rank's part of the logits.
  std::vector<ParamSplit> param_splits(Split split) const override;
  void set_split(Split split, std::shared_ptr<const ops::RankParts> parts) override;
  /// Of a split vocabulary: the loss is computed from whole logits, gathered chunk by chunk.
  void set_gather_logits(bool gather) { part_.gather_logits = gather; }

  at::Tensor weight;

 private:
  int64_t vocab_size_;
  int64_t chunk_bytes_;
  ops::VocabularyPart part_;
  std::shared_ptr<const ops::Products> products_;
  std::shared_ptr<ops::GradSink> weight_sink_;
};
TITAN_MODULE(LinearCrossEntropy);

}  // namespace titan::nn

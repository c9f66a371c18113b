#pragma once

// The loss head, and the registry of losses that a job file's [loss] may name. Your own loss is a formula of
// a token's log-sum-exp, target logit and mean logit (ops::TokenLoss):
//
//   struct FocalArgs { double gamma = 2; };
//   void describe(config::Table<FocalArgs>& table) { table.field("gamma", &FocalArgs::gamma, "..."); }
//   nn::losses().add("focal", nn::loss_kind<FocalArgs>([](const FocalArgs& args) {
//     return std::make_shared<const FocalLoss>(args.gamma);
//   }));

#include "titan/config/table.h"
#include "titan/core/registry.h"
#include "titan/nn/layers.h"
#include "titan/ops/loss.h"

namespace titan::nn {

/// A loss; null means the plain cross-entropy, by fused kernels.
using Loss = std::shared_ptr<const ops::TokenLoss>;

/// A registered loss with the type of its settings erased: `args` points to the struct that make_args()
/// returned.
struct LossKind {
  std::vector<config::FieldInfo> fields;             ///< the keys of [loss.args]
  std::function<std::shared_ptr<void>()> make_args;  ///< the defaults
  std::function<Loss(const void* args)> make;
};

/// Args is a default-constructible settings struct with a `describe(config::Table<Args>&)` beside it.
template <class Args>
LossKind loss_kind(std::function<Loss(const Args&)> make) {
  config::Table<Args> table;
  describe(table);
  return {table.fields(), [] { return std::make_shared<Args>(); },
          [make = std::move(make)](const void* args) { return make(*static_cast<const Args*>(args)); }};
}

/// "cross_entropy", "z_loss" (Chowdhery et al., "PaLM", 2022: the cross-entropy plus z_weight *
/// log_sum_exp^2) and "label_smoothing" (Szegedy et al., 2016; PyTorch's: the target has probability 1 -
/// epsilon, and epsilon is spread evenly over the vocabulary).
Registry<LossKind>& losses();

/// [loss]: the loss to minimize. [loss.args] has the chosen loss's own settings.
struct LossSettings {
  std::string name = "cross_entropy";
};
void describe(config::Table<LossSettings>& table);

/// A module that computes a loss.
class LossUser {
 public:
  virtual ~LossUser() = default;
  virtual void set_loss(Loss loss) = 0;
};

/// Gives this loss to all modules at and below `root` that compute one. Returns the number of these modules.
int64_t set_loss(torch::nn::Module& root, const Loss& loss);

struct LossHeadOptions {
  Init init;
  at::Tensor tied_weight = {};  ///< the embedding's [vocab, dim], for models that share it
  int64_t chunk_bytes =
      64 * 1024 * 1024;  ///< size of the logits that exist at one time; on a GPU, at least 4,096 rows do
  Construct construct = {};
  Loss loss = nullptr;
};

/// The model's last layer and its loss in one call. It turns hidden states into logits or, with labels, into
/// the loss, without storing all logits.
class LinearCrossEntropyImpl : public WeightedModule,
                               public ProductsUser,
                               public Splittable,
                               public LossUser {
 public:
  LinearCrossEntropyImpl(int64_t dim, int64_t vocab_size, const LossHeadOptions& options);

  /// hidden: [..., dim]; logits: [..., vocab], in hidden's dtype.
  at::Tensor forward(const at::Tensor& hidden);
  /// labels: int64 [...], where -100 is ignored. Returns the sum of this batch's token losses divided by
  /// `global_valid_tokens`, the number of labels that aren't ignored in the whole optimizer step (0: the loss
  /// is 0). The result is a scalar in fp32, or float64 in a float64 model.
  at::Tensor forward(const at::Tensor& hidden, const at::Tensor& labels,
                     const ops::ValidTokens& global_valid_tokens);

  void set_products(ops::SharedProducts products) override { products_ = std::move(products); }
  void set_loss(Loss loss) override { loss_ = std::move(loss); }

  /// Supports only Split::Columns, where each rank has a part of the vocabulary. The loss is whole on every
  /// rank (loss parallel), and the hidden states' gradient is a summand. The call without labels returns this
  /// rank's part of the logits.
  std::vector<ParamSplit> param_splits(Split split) const override;
  void set_split(Split split, std::shared_ptr<const ops::RankParts> parts) override;
  /// For a split vocabulary: whether to compute the loss from whole logits, gathered chunk by chunk.
  void set_gather_logits(bool gather) { part_.gather_logits = gather; }

 private:
  int64_t vocab_size_;
  int64_t chunk_bytes_;
  ops::VocabularyPart part_;
  ops::SharedProducts products_;
  Loss loss_;
};
TITAN_MODULE(LinearCrossEntropy);

}  // namespace titan::nn

#pragma once

// The registry of losses that a job file's [loss] may name. Your own loss is a formula of a token's
// log-sum-exp, target logit and mean logit (ops::TokenLoss):
//
//   struct FocalArgs { double gamma = 2; };
//   void describe(config::Table<FocalArgs>& table) { table.field("gamma", &FocalArgs::gamma, "..."); }
//   nn::losses().add("focal", nn::loss_kind<FocalArgs>([](const FocalArgs& args) {
//     return std::make_shared<const FocalLoss>(args.gamma);
//   }));

#include "titan/config/table.h"
#include "titan/core/registry.h"
#include "titan/ops/loss.h"

namespace torch::nn {
class Module;
}

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

}  // namespace titan::nn

#include "titan/nn/layers.h"

#include "titan/core/error.h"
#include "titan/tensor/placement.h"

namespace titan::nn {

namespace {

struct CrossEntropyArgs {};
void describe(config::Table<CrossEntropyArgs>& /*table*/) {}

struct ZLossArgs {
  double z_weight = 1e-4;
};
void describe(config::Table<ZLossArgs>& table) {
  table.field("z_weight", &ZLossArgs::z_weight,
              "factor on the square of each token's log-sum-exp, added to its cross-entropy",
              config::finite_at_least(0));
}

struct LabelSmoothingArgs {
  double epsilon = 0.1;
};
void describe(config::Table<LabelSmoothingArgs>& table) {
  table.field("epsilon", &LabelSmoothingArgs::epsilon,
              "probability that is taken from the target and spread evenly over the vocabulary",
              config::in_range(0, 1));
}

class ZLoss final : public ops::TokenLoss {
 public:
  explicit ZLoss(double z_weight) : z_weight_(z_weight) {}
  ops::TokenLosses evaluate(const ops::TokenStatistics& of) const override {
    const at::Tensor& log_sum = of.log_sum_exp;
    return {.loss = log_sum - of.target + z_weight_ * log_sum.square(),
            .by_log_sum_exp = 2 * z_weight_ * log_sum + 1,
            .by_target = at::full_like(log_sum, -1)};
  }

 private:
  double z_weight_;
};

class LabelSmoothing final : public ops::TokenLoss {
 public:
  explicit LabelSmoothing(double epsilon) : epsilon_(epsilon) {}
  bool needs_mean() const override { return true; }
  ops::TokenLosses evaluate(const ops::TokenStatistics& of) const override {
    return {.loss = of.log_sum_exp - (1 - epsilon_) * of.target - epsilon_ * of.mean,
            .by_log_sum_exp = at::ones_like(of.target),
            .by_target = at::full_like(of.target, epsilon_ - 1),
            .by_mean = at::full_like(of.target, -epsilon_)};
  }

 private:
  double epsilon_;
};

std::unique_ptr<Registry<LossKind>> built_in_losses() {
  auto registry = std::make_unique<Registry<LossKind>>("loss");
  registry->add("cross_entropy",
                loss_kind<CrossEntropyArgs>([](const CrossEntropyArgs& /*args*/) { return nullptr; }));
  registry->add("z_loss", loss_kind<ZLossArgs>([](const ZLossArgs& args) {
                  return std::make_shared<const ZLoss>(args.z_weight);
                }));
  registry->add("label_smoothing", loss_kind<LabelSmoothingArgs>([](const LabelSmoothingArgs& args) {
                  return std::make_shared<const LabelSmoothing>(args.epsilon);
                }));
  return registry;
}

}  // namespace

Registry<LossKind>& losses() {
  static const std::unique_ptr<Registry<LossKind>> registry = built_in_losses();
  return *registry;
}

void describe(config::Table<LossSettings>& table) {
  table.field(
      "name", &LossSettings::name,
      "loss of a token: \"cross_entropy\", \"z_loss\", \"label_smoothing\" or one that is registered");
}

int64_t set_loss(torch::nn::Module& root, const Loss& loss) {
  int64_t count = 0;
  root.apply([&](torch::nn::Module& module) {
    auto* user = dynamic_cast<LossUser*>(&module);
    if (!user) return;
    user->set_loss(loss);
    ++count;
  });
  return count;
}

LinearCrossEntropyImpl::LinearCrossEntropyImpl(int64_t dim, int64_t vocab_size,
                                               const LossHeadOptions& options)
    : vocab_size_(vocab_size),
      chunk_bytes_(options.chunk_bytes),
      products_(ops::default_products()),
      loss_(options.loss) {
  if (!options.tied_weight.defined()) {
    weight = register_init_parameter("weight", {vocab_size, dim}, options.init, options.construct);
    return;
  }
  TITAN_CHECK(options.tied_weight.sizes() == at::IntArrayRef({vocab_size, dim}),
              "the loss head needs a weight of [", vocab_size, ", ", dim, "]; the tied one is ",
              options.tied_weight.sizes());
  weight = register_parameter("weight", options.tied_weight);
  param_inits_.push_back({"weight", options.init});
}

at::Tensor LinearCrossEntropyImpl::forward(const at::Tensor& hidden) {
  check_entered_through_ref();
  return ops::linear(hidden, {weight, weight_sink_}, /*bias=*/{}, products_);
}

at::Tensor LinearCrossEntropyImpl::forward(const at::Tensor& hidden, const at::Tensor& labels,
                                           const ops::ValidTokens& global_valid_tokens) {
  check_entered_through_ref();
  return ops::linear_cross_entropy(hidden, weight, labels,
                                   {.global_valid_tokens = global_valid_tokens,
                                    .chunk_bytes = chunk_bytes_,
                                    .products = products_,
                                    .weight_sink = weight_sink_,
                                    .part = part_,
                                    .loss = loss_});
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

}  // namespace titan::nn

#pragma once

// The model of unit/nn/residual_model.h as a model family that supports pipelines.

#include "titan/train/model_spec.h"
#include "unit/nn/residual_model.h"

namespace titan::nn {

inline void describe(config::Table<ResidualSizes>& table) {
  table.field("dim", &ResidualSizes::dim, "width", config::at_least(1));
  table.field("vocab_size", &ResidualSizes::vocab_size, "tokens", config::at_least(1));
  table.field("num_layers", &ResidualSizes::num_layers, "blocks", config::at_least(1));
  table.field("tied", &ResidualSizes::tied, "one matrix for embedding and head");
}

}  // namespace titan::nn

namespace titan::train {

class ResidualModel : public TrainableModel {
 public:
  ResidualModel(const nn::ResidualSizes& sizes, const nn::Construct& construct) : model(sizes, construct) {}
  nn::AnyRef root() override { return model; }
  at::Tensor hidden(const at::Tensor& input) override { return model(input); }
  at::Tensor loss(const at::Tensor& input, const at::Tensor& labels,
                  const ops::ValidTokens& global_valid_tokens) override {
    return model(input, labels, global_valid_tokens);
  }
  nn::Residual model;
};

/// Registers it as "residual", once per process.
inline void register_residual() {
  if (model_specs().contains("residual")) return;
  register_model<nn::ResidualSizes>(
      "residual", {.flavors = {{"small", {}}},
                   .sizes = [](const nn::ResidualSizes& sizes) -> ModelSizes {
                     return {.num_layers = sizes.num_layers, .vocab_size = sizes.vocab_size};
                   },
                   .build =
                       [](const nn::ResidualSizes& sizes, const BuildOptions& options) {
                         return std::make_unique<ResidualModel>(sizes, options.construct);
                       },
                   .parallelize = [](TrainableModel& model,
                                     const ParallelPlan& plan) { fully_shard(model.root(), plan.fsdp); }});
}

}  // namespace titan::train

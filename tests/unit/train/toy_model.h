#pragma once

// The smallest model with a loss: a table of logits, indexed by the previous token.

#include <ATen/ATen.h>

#include "titan/nn/module.h"
#include "titan/train/model_spec.h"

namespace titan::train {

class BigramImpl : public nn::Module {
 public:
  BigramImpl(int64_t vocab_size, const nn::Construct& construct) {
    table_ = register_init_parameter("table", {vocab_size, vocab_size}, nn::Init::normal(0, 0.5), construct);
  }
  at::Tensor forward(const at::Tensor& tokens_BS) { return at::embedding(table_, tokens_BS); }

 private:
  at::Tensor table_;
};
TITAN_MODULE(Bigram);

struct BigramArgs {
  int64_t vocab_size = 16;
};

inline void describe(config::Table<BigramArgs>& table) {
  table.field("vocab_size", &BigramArgs::vocab_size, "tokens", config::at_least(1));
}

class BigramModel : public TrainableModel {
 public:
  explicit BigramModel(int64_t vocab_size, const nn::Construct& construct = {})
      : model(vocab_size, construct) {}
  nn::AnyRef root() override { return model; }
  at::Tensor loss(const at::Tensor& tokens_BS, const at::Tensor& labels_BS,
                  const ops::ValidTokens& global_valid_tokens) override {
    at::Tensor logits_NV = model(tokens_BS).flatten(0, 1);
    return at::cross_entropy_loss(logits_NV, labels_BS.flatten(), {}, at::Reduction::Sum, -100) /
           global_valid_tokens;
  }
  Bigram model;
};

}  // namespace titan::train

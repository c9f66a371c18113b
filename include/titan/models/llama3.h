#pragma once

// Llama 3 and 3.1 (Grattafiori et al., "The Llama 3 herd of models", 2024): the model on one device. How it
// is spread over ranks stands in parallelize.cpp.

#include <cstdint>

#include "titan/models/llama3_args.h"
#include "titan/nn/attention.h"
#include "titan/nn/containers.h"
#include "titan/nn/embedding.h"
#include "titan/nn/feed_forward.h"
#include "titan/nn/layer_sequence.h"
#include "titan/nn/linear_cross_entropy.h"
#include "titan/nn/rms_norm.h"
#include "titan/nn/rotary_embedding.h"

namespace titan::models {

/// h = x + attention(norm(x)); h + feed_forward(norm(h)).
class TransformerBlockImpl : public nn::Module {
 public:
  TransformerBlockImpl(int64_t layer_id, const Llama3Args& args, const nn::RotaryEmbedding& rotary,
                       const nn::Construct& construct);
  /// x: [B, S, D]; positions: int64 [S] or [B, S], undefined: 0..S-1.
  at::Tensor forward(const at::Tensor& x_BSD, const at::Tensor& positions = {});

  nn::Attention attention;
  nn::FeedForward feed_forward;
  nn::RMSNorm attention_norm, ffn_norm;
};
TITAN_MODULE(TransformerBlock);

/// A pipeline stage has a part of it (keep_layers): the modules that it hasn't are empty handles, its input
/// is the hidden states [B, S, D] of the stage before where tok_embeddings isn't there, and its output where
/// `output` isn't.
class Llama3Impl : public nn::Module, public nn::LayerSequence {
 public:
  explicit Llama3Impl(const Llama3Args& args, const nn::Construct& construct = {});

  /// tokens: int64 [B, S]; logits: [B, S, V].
  at::Tensor forward(const at::Tensor& input);
  /// labels: int64 [B, S], -100 doesn't count. The sum of the token losses over `global_valid_tokens`: a
  /// scalar, at least fp32.
  at::Tensor forward(const at::Tensor& input, const at::Tensor& labels_BS, int64_t global_valid_tokens);

  const Llama3Args& args() const { return args_; }

 private:
  at::Tensor hidden_states(const at::Tensor& input);
  void layers_dropped() override;
  Llama3Args args_;

 public:
  nn::Embedding tok_embeddings;
  nn::RotaryEmbedding rotary;
  nn::ModuleList<TransformerBlock> layers;
  nn::RMSNorm norm;
  nn::LinearCrossEntropy output;
};
TITAN_MODULE(Llama3);

}  // namespace titan::models

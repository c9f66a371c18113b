#pragma once

#include <cstdint>

#include "titan/nn/attention_core.h"
#include "titan/nn/linear.h"
#include "titan/nn/rotary_embedding.h"

namespace titan::nn {

struct AttentionOptions {
  int64_t dim = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;  ///< a divisor of num_heads
  Init input_init;           ///< of wq, wk, wv
  Init output_init;          ///< of wo
  Construct construct = {};
};

/// Causal self-attention with grouped queries and rotary positions (Ainslie et al., GQA, 2023). x: [B, S,
/// dim]; result the same.
///
/// The number of heads is read off the products' width, so a part of the heads (tensor parallelism) needs no
/// other code.
class AttentionImpl : public Module, public AttentionUser {
 public:
  /// `rotary` is shared with the other layers; it belongs to the model.
  AttentionImpl(const AttentionOptions& options, RotaryEmbedding rotary);
  at::Tensor forward(const at::Tensor& x_BSD, const at::Tensor& positions = {});
  void set_attention_core(std::shared_ptr<AttentionCore> core) override { core_ = std::move(core); }

  Linear wq, wk, wv, wo;

 private:
  int64_t head_dim_;
  RotaryEmbedding rotary_;
  std::shared_ptr<AttentionCore> core_;  // null: ops::causal_attention
};
TITAN_MODULE(Attention);

}  // namespace titan::nn

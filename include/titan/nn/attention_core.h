#pragma once

// Where a model's attention and positions can be exchanged, so that a sequence may be spread over ranks
// (titan::context_parallel) without the model knowing. A module of one's own joins by implementing
// AttentionUser or PositionUser and passing through what it was given.

#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

namespace titan::nn {

/// Causal attention, as ops::causal_attention computes it: q [B, S, H, E]; k, v [B, S, K, E]; result as q.
/// S counts the tokens that this rank holds. Differentiable. Shared by the calls of a module, one at a time.
class AttentionCore {
 public:
  virtual ~AttentionCore() = default;
  virtual at::Tensor attend(const at::Tensor& q_BSHE, const at::Tensor& k_BSKE, const at::Tensor& v_BSKE) = 0;
};

/// A module that attends.
class AttentionUser {
 public:
  virtual ~AttentionUser() = default;
  /// From now on instead of ops::causal_attention.
  virtual void set_attention_core(std::shared_ptr<AttentionCore> core) = 0;
};

/// Where the tokens that this rank holds stand in their sequence.
class TokenPositions {
 public:
  virtual ~TokenPositions() = default;
  /// int64 [num_tokens] on `device`. Stays valid until the next call.
  virtual const at::Tensor& of(int64_t num_tokens, at::Device device) = 0;
};

/// A module that computes with positions (rotary or learned embeddings).
class PositionUser {
 public:
  virtual ~PositionUser() = default;
  /// Used from now on where a caller gives no positions, instead of 0, 1, 2, ...
  virtual void set_token_positions(std::shared_ptr<TokenPositions> positions) = 0;
};

}  // namespace titan::nn

#pragma once

// A parallelism with its own communication: each rank of an axis computes one slice of every sequence.

#include <memory>

#include <ATen/core/Tensor.h>

/// The tokens of a sequence before this rank's slice. This is all that the model knows about other ranks.
class EarlierTokens {
 public:
  virtual ~EarlierTokens() = default;
  /// `own_BH`: a sum over this rank's tokens. Returns the same sum over all earlier tokens, with gradients.
  virtual at::Tensor sum(const at::Tensor& own_BH) = 0;
  /// Number of earlier tokens, if this rank has `num_own` tokens.
  virtual int64_t count(int64_t num_own) const = 0;
};

/// A module that needs the earlier tokens. Initially null: this rank has whole sequences.
class EarlierTokensUser {
 public:
  virtual ~EarlierTokensUser() = default;
  virtual void set_earlier_tokens(std::shared_ptr<EarlierTokens> earlier) = 0;
};

/// Registers the parallelism "slices", with settings in [parallelism.args.slices].
void register_slices();

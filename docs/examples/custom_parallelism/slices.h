#pragma once

// A parallelism with communication of its own: each rank of an axis computes one slice of every sequence.

#include <memory>

#include <ATen/core/Tensor.h>

/// The tokens of a sequence that lie before this rank's slice. All that the model knows of other ranks.
class EarlierTokens {
 public:
  virtual ~EarlierTokens() = default;
  /// `own_BH`: a sum over this rank's tokens. Returns the same sum over all earlier tokens, with gradients.
  virtual at::Tensor sum(const at::Tensor& own_BH) = 0;
  /// How many there are, where this rank has `num_own`.
  virtual int64_t count(int64_t num_own) const = 0;
};

/// A module that needs them. Null, the start: this rank has whole sequences.
class EarlierTokensUser {
 public:
  virtual ~EarlierTokensUser() = default;
  virtual void set_earlier_tokens(std::shared_ptr<EarlierTokens> earlier) = 0;
};

/// [parallelism.args.slices]
void register_slices();

#pragma once

// The loss of hidden states with a vocabulary matrix, computed without ever storing all logits, and an
// interface for losses.
//
//   at::Tensor loss = ops::linear_cross_entropy(
//       hidden, weight, labels, {.global_valid_tokens = count, .products = ops::default_products()});

#include <optional>

#include "titan/ops/linear.h"

namespace titan::ops {

/// The label of tokens without a loss.
inline constexpr int64_t kIgnoredLabel = -100;

/// A loss may depend on these statistics, float64 [N], one value per token.
struct TokenStatistics {
  at::Tensor log_sum_exp;  ///< log(sum(exp(logits)))
  at::Tensor target;       ///< the label's logit; the cross-entropy is log_sum_exp - target
  at::Tensor mean;         ///< mean of the logits over the whole vocabulary; undefined unless needs_mean()
};

/// Losses and their derivatives by the three statistics, float64 [N]; an undefined derivative is 0.
struct TokenLosses {
  at::Tensor loss, by_log_sum_exp, by_target, by_mean = {};
};

/// [Note: token losses]
/// A loss other than the plain cross-entropy: a function of a token's statistics. Ranks with parts of the
/// vocabulary can combine their statistics, so an implementation doesn't depend on ranks, chunks or
/// micro-batches. The gradient of logit j follows from the derivatives:
///   by_log_sum_exp * softmax_j + by_target * [j is the label] + by_mean / vocabulary size
class TokenLoss {
 public:
  virtual ~TokenLoss() = default;
  virtual bool needs_mean() const { return false; }
  /// Must work on every device, including meta. Values at ignored labels are dropped.
  virtual TokenLosses evaluate(const TokenStatistics& statistics) const = 0;
};

/// The number of labels that aren't ignored in a whole optimizer step, on all ranks: what its loss is divided by.
class ValidTokens {
 public:
  // NOLINTNEXTLINE(google-explicit-constructor): all but CUDA graphs pass numbers
  ValidTokens(int64_t count);
  /// For work that is recorded as a CUDA graph, which may have another number at each launch. `inverse`: one over the
  /// number, a float64 scalar on the device.
  static ValidTokens on_device(at::Tensor inverse);
  /// Unset: only the device knows the number.
  std::optional<int64_t> on_host() const;

  /// sum * (1 / number), in the sum's dtype, with a gradient; 0 if the number is 0.
  friend at::Tensor operator/(const at::Tensor& sum, const ValidTokens& number);

 private:
  int64_t count_;
  at::Tensor inverse_;  // if defined, in place of the count
};

struct LossOptions {
  ValidTokens global_valid_tokens = 0;  ///< the sum is divided by this; 0: the loss and its gradients are 0
  int64_t chunk_bytes =
      64 * 1024 * 1024;  ///< size of the logits that exist at one time; on a GPU, at least 4,096 rows do
  std::shared_ptr<const Products> products;
  std::shared_ptr<GradSink> weight_sink = nullptr;  ///< receives the weight's gradient in the backward
  VocabularyPart part = {};                         ///< the rows of the vocabulary that the weight has
  std::shared_ptr<const TokenLoss> loss = nullptr;  ///< null: the cross-entropy, by fused kernels
};

/// The sum over the tokens of -log softmax(h W^T)[label], or of options.loss, divided by
/// options.global_valid_tokens. hidden: [..., D]; weight: [V, D]; labels: int64 [...] in [0, V) or
/// kIgnoredLabel (CPUs report others as an error). The result is a scalar in fp32, or float64 for float64
/// input; token losses are summed in double.
///
/// [Note: chunks] For a few tokens at a time, logits are computed, replaced by their gradient in place, and
/// multiplied into both gradients, so the logits of all tokens never exist together. Thus the forward
/// computes the gradients too (if any are needed), and the backward only scales them. The weight's gradient
/// is summed over the chunks in fp32, in memory that options.weight_sink lends or in a buffer of its own.
/// First derivatives only.
///
/// [Note: parts of a vocabulary] With options.part the weight has one rank's rows. Each chunk needs one small
/// all-gather of each part's statistics per token. (TorchTitan's loss parallel reduces three times: maximum,
/// sum of exponentials, target.) All ranks get the same loss, bit for bit; each rank's gradient of `hidden`
/// is a summand that the caller reduces.
at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight_VD,
                                const at::Tensor& labels, const LossOptions& options);

}  // namespace titan::ops

#pragma once

// The loss of hidden states under a vocabulary matrix, without ever storing all logits, and the losses that
// it can compute.
//
//   at::Tensor loss = ops::linear_cross_entropy(
//       hidden, weight, labels, {.global_valid_tokens = count, .products = ops::default_products()});

#include "titan/ops/linear.h"

namespace titan::ops {

/// A label that doesn't count.
inline constexpr int64_t kIgnoredLabel = -100;

/// What a loss may depend on, float64 [N], one value for each token.
struct TokenStatistics {
  at::Tensor log_sum_exp;  ///< log(sum(exp(logits)))
  at::Tensor target;       ///< the label's logit; the cross-entropy is log_sum_exp - target
  at::Tensor mean;         ///< of the logits over the whole vocabulary; undefined unless needs_mean()
};

/// Losses and their derivatives by the three statistics, float64 [N]; an undefined derivative is 0.
struct TokenLosses {
  at::Tensor loss, by_log_sum_exp, by_target, by_mean = {};
};

/// [Note: token losses]
/// A loss other than the plain cross-entropy: a function of a token's statistics. Ranks that hold parts of
/// the vocabulary can add these up, so an implementation needs to know neither them nor chunks nor
/// micro-batches. The gradient of logit j follows from the derivatives:
///   by_log_sum_exp * softmax_j + by_target * [j is the label] + by_mean / vocabulary size
class TokenLoss {
 public:
  virtual ~TokenLoss() = default;
  virtual bool needs_mean() const { return false; }
  /// The same on every device, the meta device included; values at ignored labels are dropped.
  virtual TokenLosses evaluate(const TokenStatistics& statistics) const = 0;
};

struct LossOptions {
  int64_t global_valid_tokens = 0;  ///< the sum is divided by it; 0: the loss is 0 and so are its gradients
  int64_t chunk_bytes = 64 * 1024 * 1024;  ///< size of the logits that exist at one time
  std::shared_ptr<const Products> products;
  std::shared_ptr<GradSink> weight_sink = nullptr;  ///< takes the weight's gradient in the backward
  VocabularyPart part = {};                         ///< which rows of the vocabulary the weight holds
  std::shared_ptr<const TokenLoss> loss = nullptr;  ///< null: the cross-entropy, by fused kernels
};

/// The sum over the tokens of -log softmax(h W^T)[label], or of options.loss, divided by
/// options.global_valid_tokens. hidden: [..., D]; weight: [V, D]; labels: int64 [...] in [0, V) or
/// kIgnoredLabel (CPUs report others as an error). A scalar: fp32, or float64 for float64 input; token losses
/// are summed in double.
///
/// [Note: chunks] A few tokens at a time, logits are computed, replaced by their gradient in place, and
/// multiplied into both gradients: they never exist as a whole. So the forward computes the gradients too (if
/// any are wanted), and the backward only scales them. The weight's gradient is summed over the chunks in one
/// fp32 buffer. First derivatives only.
///
/// [Note: parts of a vocabulary] With options.part the weight is one rank's rows. A chunk costs one small
/// all-gather of each part's statistics per token. (TorchTitan's loss parallel sums three times: maximum, sum
/// of exponentials, target.) All ranks get the same loss, bit for bit; each one's gradient of `hidden` is a
/// summand that the caller reduces.
at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight_VD,
                                const at::Tensor& labels, const LossOptions& options);

}  // namespace titan::ops

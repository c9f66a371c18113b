#pragma once

#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

#include "titan/ops/products.h"

namespace titan::ops {

/// A label that doesn't count.
inline constexpr int64_t kIgnoredLabel = -100;

struct LossOptions {
  int64_t global_valid_tokens = 0;  ///< what the sum is divided by; 0: the loss is 0 and so are its gradients
  int64_t chunk_bytes = 64 * 1024 * 1024;  ///< of the logits that exist at one time
  std::shared_ptr<const Products> products;
  std::shared_ptr<GradSink> weight_sink = nullptr;  ///< takes the weight's gradient in the backward
  VocabularyPart part = {};                         ///< which rows of the vocabulary the weight holds
};

/// The sum over the tokens of -log softmax(h W^T)[label], divided by options.global_valid_tokens. hidden:
/// [..., D]; weight: [V, D]; labels: int64 [...] in [0, V) or kIgnoredLabel (others are an error on CPUs). A
/// scalar: fp32, or float64 of float64 input; token losses are summed in double.
///
/// [Note: chunks] Logits are made, turned into their gradient in place, and multiplied into both gradients a
/// few tokens at a time: they never exist whole. So the forward computes the gradients, too (when there are
/// to be any), and the backward only scales them. The weight's gradient is summed over the chunks in one fp32
/// buffer. First derivatives only.
///
/// [Note: parts of a vocabulary] With options.part the weight is one rank's rows. A chunk costs one small
/// all-gather: each part's log-sum-exp and target logit per token. (TorchTitan's loss parallel sums three
/// times: maximum, sum of exponentials, target.) All ranks get the same loss, bit for bit; each one's
/// gradient of `hidden` is a summand, to be reduced by the caller.
at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight_VD,
                                const at::Tensor& labels, const LossOptions& options);

}  // namespace titan::ops

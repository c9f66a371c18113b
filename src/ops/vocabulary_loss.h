#pragma once

// The cross-entropy of a chunk of tokens whose logits are spread over ranks by vocabulary.

#include <ATen/core/Tensor.h>

#include "titan/ops/rank_parts.h"

namespace titan::ops {

/// Sum of the token losses (double, the same on all ranks). logits: [N, rows of this part]; with_grad turns
/// them into their gradient. labels: int64 [N] in the whole vocabulary, or kIgnoredLabel.
at::Tensor vocabulary_cross_entropy_(at::Tensor& logits, const at::Tensor& labels, const VocabularyPart& part,
                                     bool with_grad);

}  // namespace titan::ops

#include "ops/vocabulary_loss.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>

#include "ops/operators.h"
#include "titan/core/error.h"
#include "titan/ops/linear_cross_entropy.h"

namespace titan::ops {

namespace {

int64_t padded_part(const VocabularyPart& part) {
  return (part.size + part.parts->count() - 1) / part.parts->count();
}

// [N, rows of this part] to [N, vocabulary]; the last parts may be shorter, so they travel padded.
at::Tensor whole_logits(const at::Tensor& logits, const VocabularyPart& part) {
  const int64_t width = padded_part(part), tokens = logits.size(0);
  const at::Tensor mine = at::constant_pad_nd(logits, {0, width - logits.size(1)}).contiguous();
  const at::Tensor all = at::empty({part.parts->count(), tokens, width}, logits.options());
  part.parts->all_gather(all.flatten(1), mine.flatten(), "tp::vocabulary");
  return all.transpose(0, 1).reshape({tokens, -1}).narrow(1, 0, part.size).contiguous();
}

at::Tensor from_whole_logits(at::Tensor& logits, const at::Tensor& labels, const VocabularyPart& part,
                             bool with_grad) {
  using Signature = at::Tensor(at::Tensor&, const at::Tensor&, bool);
  static const auto cross_entropy = find_operator<Signature>("titan::cross_entropy_");
  at::Tensor whole = whole_logits(logits, part);
  const at::Tensor loss = cross_entropy.call(whole, labels, with_grad);
  if (with_grad) logits.copy_(whole.narrow(1, part.first, logits.size(1)));
  return loss;
}

// Over the first dimension; LibTorch's own doesn't know meta tensors. Some part has a token, so there is a
// largest number.
at::Tensor log_sum_exp(const at::Tensor& x) {
  const at::Tensor largest = x.amax(0);
  return (x - largest).exp().sum(0).log() + largest;
}

at::Tensor from_parts(at::Tensor& logits, const at::Tensor& labels, const VocabularyPart& part,
                      bool with_grad) {
  using Stats = at::Tensor(const at::Tensor&, const at::Tensor&, int64_t);
  using Grad = void(at::Tensor&, const at::Tensor&, int64_t, const at::Tensor&);
  static const auto stats_op = find_operator<Stats>("titan::vocabulary_stats");
  static const auto grad_op = find_operator<Grad>("titan::vocabulary_grad_");
  const at::Tensor mine = stats_op.call(logits, labels, part.first);
  const at::Tensor all = at::empty({part.parts->count(), mine.numel()}, mine.options());
  part.parts->all_gather(all, mine.view(-1), "tp::vocabulary");
  const at::Tensor stats = all.view({part.parts->count(), 2, -1});
  const at::Tensor log_sum = log_sum_exp(stats.select(1, 0)), target = stats.select(1, 1).sum(0);
  if (with_grad) grad_op.call(logits, labels, part.first, log_sum);
  return (log_sum - target).masked_fill_(labels.eq(kIgnoredLabel), 0).sum();
}

}  // namespace

at::Tensor vocabulary_cross_entropy_(at::Tensor& logits, const at::Tensor& labels, const VocabularyPart& part,
                                     bool with_grad) {
  TITAN_INTERNAL_ASSERT(part.parts, "a vocabulary that isn't spread");
  return part.gather_logits ? from_whole_logits(logits, labels, part, with_grad)
                            : from_parts(logits, labels, part, with_grad);
}

}  // namespace titan::ops

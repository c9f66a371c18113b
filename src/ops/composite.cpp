#include "ops/composite.h"

#include <limits>

#include <ATen/TensorOperators.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include "titan/ops/linear_cross_entropy.h"

namespace titan::ops::composite {

namespace {
at::Tensor widened(const at::Tensor& tensor) { return tensor.to(accumulate_type(tensor)); }
}  // namespace

std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const at::Tensor wide = widened(x);
  const at::Tensor rstd = at::rsqrt(wide.square().mean(-1, /*keepdim=*/true) + eps);
  return {(wide * rstd * widened(weight)).to(x.scalar_type()), rstd.squeeze(-1)};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad, const at::Tensor& x,
                                                     const at::Tensor& weight, const at::Tensor& rstd) {
  const at::Tensor scale = rstd.unsqueeze(-1);
  const at::Tensor normed = widened(x) * scale;
  const at::Tensor wide_grad = widened(grad);
  const at::Tensor grad_normed = wide_grad * widened(weight);
  const at::Tensor grad_x =
      scale * (grad_normed - normed * (grad_normed * normed).mean(-1, /*keepdim=*/true));
  return {grad_x.to(x.scalar_type()), (wide_grad * normed).reshape({-1, x.size(-1)}).sum(0)};
}

at::Tensor rotary(const at::Tensor& x, const at::Tensor& table, const std::optional<at::Tensor>& positions,
                  bool inverse) {
  const int64_t half = x.size(3) / 2;
  at::Tensor rows = positions ? at::embedding(table, *positions) : table.slice(0, 0, x.size(1));
  rows = rows.to(accumulate_type(x));
  if (rows.dim() == 2) rows = rows.unsqueeze(0);
  const at::Tensor cos_sin = rows.unflatten(-1, {half, 2}).unsqueeze(2);  // [1 or B, S, 1, D/2, 2]
  const at::Tensor cos = cos_sin.select(-1, 0);
  const at::Tensor sin = inverse ? cos_sin.select(-1, 1).neg() : cos_sin.select(-1, 1);
  const at::Tensor pairs = widened(x).unflatten(-1, {half, 2});
  const at::Tensor even = pairs.select(-1, 0), odd = pairs.select(-1, 1);
  return at::stack({even * cos - odd * sin, even * sin + odd * cos}, -1).flatten(-2).to(x.scalar_type());
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  const at::Tensor wide = widened(gate);
  return (wide * at::sigmoid(wide) * widened(up)).to(gate.scalar_type());
}

std::tuple<at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& grad, const at::Tensor& gate,
                                                   const at::Tensor& up) {
  const at::Tensor wide_gate = widened(gate), wide_grad = widened(grad);
  const at::Tensor s = at::sigmoid(wide_gate);
  const at::Tensor grad_gate = wide_grad * widened(up) * s * (1 + wide_gate * (1 - s));
  return {grad_gate.to(gate.scalar_type()), (wide_grad * wide_gate * s).to(gate.scalar_type())};
}

at::Tensor cross_entropy_(at::Tensor& logits, const at::Tensor& labels, bool with_grad) {
  const at::Tensor valid = labels.ne(kIgnoredLabel);
  const at::Tensor column = labels.clamp_min(0).unsqueeze(1);
  const at::Tensor wide = widened(logits);
  const at::Tensor log_sum = at::logsumexp(wide, {1}, /*keepdim=*/true);
  const at::Tensor losses = (log_sum - wide.gather(1, column)).squeeze(1);
  const at::Tensor total = losses.to(at::kDouble).masked_fill(valid.logical_not(), 0).sum();
  if (with_grad) {
    const at::Tensor mask = valid.unsqueeze(1).to(wide.scalar_type());
    at::Tensor grad = (wide - log_sum).exp_().mul_(mask);
    logits.copy_(grad.scatter_add_(1, column, mask.neg()));
  }
  return total;
}

at::Tensor vocabulary_stats(const at::Tensor& logits, const at::Tensor& labels, int64_t first) {
  const at::Tensor wide = logits.to(at::kDouble), column = labels - first;
  const at::Tensor foreign = column.lt(0) | column.ge(logits.size(1));
  if (logits.size(1) == 0) {
    const at::Tensor nothing = at::zeros({2, logits.size(0)}, wide.options());
    nothing.select(0, 0).fill_(-std::numeric_limits<double>::infinity());
    return nothing;
  }
  const at::Tensor target = wide.gather(1, column.masked_fill(foreign, 0).unsqueeze(1)).squeeze(1);
  return at::stack({at::logsumexp(wide, {1}), target.masked_fill(foreign, 0)});
}

void vocabulary_grad_(at::Tensor& logits, const at::Tensor& labels, int64_t first,
                      const at::Tensor& log_sum) {
  if (logits.size(1) == 0) return;
  const at::Tensor column = labels - first;
  const at::Tensor foreign = column.lt(0) | column.ge(logits.size(1));
  const at::Tensor grad = (logits.to(at::kDouble) - log_sum.unsqueeze(1)).exp_();
  grad.scatter_add_(1, column.masked_fill(foreign, 0).unsqueeze(1),
                    foreign.to(at::kDouble).sub_(1).unsqueeze(1));
  logits.copy_(grad.masked_fill_(labels.eq(kIgnoredLabel).unsqueeze(1), 0));
}

at::Tensor embedding_backward(const at::Tensor& grad, const at::Tensor& tokens, int64_t num_embeddings) {
  const at::Tensor rows = widened(grad).reshape({-1, grad.size(-1)});
  return at::zeros({num_embeddings, grad.size(-1)}, rows.options()).index_add_(0, tokens.reshape({-1}), rows);
}

}  // namespace titan::ops::composite

#include "ops/operators.h"

#include <limits>

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/result_type.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "ops/attention_kernels.h"
#include "titan/core/error.h"
#include "titan/ops/loss.h"

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

namespace titan::ops {

// The operations that LibTorch's dispatcher knows us by (profiles show these names), their Meta kernels, and
// what runs where nothing better is registered. CPU kernels register themselves in src/ops/cpu, CUDA ones in
// the plugin. None is differentiable by itself: the functions of include/titan/ops are.

namespace {

std::tuple<at::Tensor, at::Tensor> rms_norm_meta(const at::Tensor& x, const at::Tensor& /*weight*/,
                                                 double /*eps*/) {
  const auto rows = x.sizes().slice(0, static_cast<size_t>(x.dim() - 1));
  return {at::empty_like(x), at::empty(rows, x.options().dtype(composite::accumulate_type(x)))};
}
std::tuple<at::Tensor, at::Tensor> rms_norm_backward_meta(const at::Tensor& /*grad*/, const at::Tensor& x,
                                                          const at::Tensor& weight,
                                                          const at::Tensor& /*rstd*/) {
  return {at::empty_like(x), at::empty(weight.sizes(), x.options().dtype(composite::accumulate_type(x)))};
}
at::Tensor rotary_meta(const at::Tensor& x, const at::Tensor& /*table*/,
                       const std::optional<at::Tensor>& /*positions*/, bool /*inverse*/) {
  return at::empty_like(x);
}
at::Tensor swiglu_meta(const at::Tensor& gate, const at::Tensor& /*up*/) { return at::empty_like(gate); }
std::tuple<at::Tensor, at::Tensor> swiglu_backward_meta(const at::Tensor& /*grad*/, const at::Tensor& gate,
                                                        const at::Tensor& up) {
  return {at::empty_like(gate), at::empty_like(up)};
}
std::tuple<at::Tensor, at::Tensor> causal_attention_meta(const at::Tensor& q, const at::Tensor& /*k*/,
                                                         const at::Tensor& /*v*/) {
  return {at::empty(q.sizes(), q.options()),
          at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(composite::accumulate_type(q)))};
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> causal_attention_backward_meta(
    const at::Tensor& /*grad*/, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& /*out*/, const at::Tensor& /*log_sum_exp*/) {
  return {at::empty(q.sizes(), q.options()), at::empty(k.sizes(), k.options()),
          at::empty(v.sizes(), v.options())};
}
void attend_meta(at::Tensor& /*out*/, at::Tensor& /*log_sum_exp*/, const at::Tensor& /*q*/,
                 const at::Tensor& /*k*/, const at::Tensor& /*v*/, int64_t /*first_query*/) {}
void attend_backward_meta(at::Tensor& /*grad_q*/, at::Tensor& /*grad_k*/, at::Tensor& /*grad_v*/,
                          const at::Tensor& /*grad*/, const at::Tensor& /*q*/, const at::Tensor& /*k*/,
                          const at::Tensor& /*v*/, const at::Tensor& /*out*/,
                          const at::Tensor& /*log_sum_exp*/, int64_t /*first_query*/) {}
at::Tensor cross_entropy_meta(at::Tensor& logits, const at::Tensor& /*labels*/, bool /*with_grad*/) {
  return at::empty({}, logits.options().dtype(at::kDouble));
}
at::Tensor vocabulary_stats_meta(const at::Tensor& logits, const at::Tensor& /*labels*/, int64_t /*first*/) {
  return at::empty({2, logits.size(0)}, logits.options().dtype(at::kDouble));
}
void vocabulary_grad_meta(at::Tensor& /*logits*/, const at::Tensor& /*labels*/, int64_t /*first*/,
                          const at::Tensor& /*log_sum*/) {}
at::Tensor embedding_backward_meta(const at::Tensor& grad, const at::Tensor& /*tokens*/,
                                   int64_t num_embeddings) {
  return at::empty({num_embeddings, grad.size(-1)}, grad.options().dtype(composite::accumulate_type(grad)));
}

TORCH_LIBRARY(titan, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor y, Tensor rstd)");
  m.def(
      "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor rstd) -> (Tensor grad_x, Tensor "
      "grad_weight)");
  m.def("rotary(Tensor x, Tensor table, Tensor? positions, bool inverse) -> Tensor");
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  m.def("swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor grad_gate, Tensor grad_up)");
  // Causal, without a fallback: devices without kernels of ours use LibTorch's scaled_dot_product_attention.
  m.def("causal_attention(Tensor q, Tensor k, Tensor v) -> (Tensor out, Tensor log_sum_exp)");
  m.def(
      "causal_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor log_sum_exp) "
      "-> (Tensor grad_q, Tensor grad_k, "
      "Tensor grad_v)");
  // Attention over part of the keys, added to what `out` and `log_sum_exp` hold of others; query i sees the
  // keys 0 .. first_query + i. The backward adds to the gradients; it takes `out` and `log_sum_exp` of all
  // keys.
  m.def(
      "attend_(Tensor(a!) out, Tensor(b!) log_sum_exp, Tensor q, Tensor k, Tensor v, int first_query) -> ()");
  m.def(
      "attend_backward_(Tensor(a!) grad_q, Tensor(b!) grad_k, Tensor(c!) grad_v, Tensor grad, Tensor q, "
      "Tensor k, Tensor v, Tensor out, Tensor log_sum_exp, int first_query) -> ()");
  // Sum of the token losses (double). With with_grad, `logits` become its gradient.
  m.def("cross_entropy_(Tensor(a!) logits, Tensor labels, bool with_grad) -> Tensor");
  // Of logits [N, rows of a part]: each token's log-sum-exp and target logit (0 where the target is another
  // part's): double [2, N].
  m.def("vocabulary_stats(Tensor logits, Tensor labels, int first) -> Tensor");
  // Turns them into their gradient; log_sum: double [N], over all parts.
  m.def("vocabulary_grad_(Tensor(a!) logits, Tensor labels, int first, Tensor log_sum) -> ()");
  m.def("embedding_backward(Tensor grad, Tensor tokens, int num_embeddings) -> Tensor");
}

TORCH_LIBRARY_IMPL(titan, CompositeExplicitAutograd, m) {
  m.impl("rms_norm", composite::rms_norm);
  m.impl("rms_norm_backward", composite::rms_norm_backward);
  m.impl("rotary", composite::rotary);
  m.impl("swiglu", composite::swiglu);
  m.impl("swiglu_backward", composite::swiglu_backward);
  m.impl("attend_", attend_by_libtorch);
  m.impl("attend_backward_", attend_backward_by_libtorch);
  m.impl("cross_entropy_", composite::cross_entropy_);
  m.impl("vocabulary_stats", composite::vocabulary_stats);
  m.impl("vocabulary_grad_", composite::vocabulary_grad_);
  m.impl("embedding_backward", composite::embedding_backward);
}

TORCH_LIBRARY_IMPL(titan, Meta, m) {
  m.impl("rms_norm", rms_norm_meta);
  m.impl("rms_norm_backward", rms_norm_backward_meta);
  m.impl("rotary", rotary_meta);
  m.impl("swiglu", swiglu_meta);
  m.impl("swiglu_backward", swiglu_backward_meta);
  m.impl("causal_attention", causal_attention_meta);
  m.impl("causal_attention_backward", causal_attention_backward_meta);
  m.impl("attend_", attend_meta);
  m.impl("attend_backward_", attend_backward_meta);
  m.impl("cross_entropy_", cross_entropy_meta);
  m.impl("vocabulary_stats", vocabulary_stats_meta);
  m.impl("vocabulary_grad_", vocabulary_grad_meta);
  m.impl("embedding_backward", embedding_backward_meta);
}

}  // namespace

// Meta kernels (sizes without data) of LibTorch's operations that PyTorch keeps in Python: without them a dry
// run of a model stops at its embedding. Memory layouts are those of the CPU kernels.

namespace {

at::Tensor index_select(const at::Tensor& self, int64_t dim, const at::Tensor& index) {
  std::vector<int64_t> sizes = self.sizes().vec();
  if (!sizes.empty()) sizes[static_cast<size_t>(at::maybe_wrap_dim(dim, self.dim()))] = index.numel();
  return at::empty(sizes, self.options());
}

at::Tensor embedding_dense_backward(const at::Tensor& grad, const at::Tensor& /*indices*/,
                                    int64_t num_weights, int64_t /*padding_idx*/,
                                    bool /*scale_grad_by_freq*/) {
  return at::empty({num_weights, grad.size(-1)}, grad.options());
}

at::Tensor where(const at::Tensor& condition, const at::Tensor& self, const at::Tensor& other) {
  const auto sizes = at::infer_size(condition.sizes(), at::infer_size(self.sizes(), other.sizes()));
  return at::empty(sizes, self.options().dtype(at::result_type(self, other)));
}

// Heads before the sequence in the sizes, behind it in memory.
at::Tensor heads_first(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::empty({sizes[0], sizes[2], sizes[1], sizes[3]}, options).transpose(1, 2);
}

std::tuple<at::Tensor, at::Tensor> flash_attention(const at::Tensor& query, const at::Tensor& /*key*/,
                                                   const at::Tensor& value, double /*dropout_p*/,
                                                   bool /*is_causal*/,
                                                   const std::optional<at::Tensor>& /*mask*/,
                                                   std::optional<double> /*scale*/) {
  const auto sizes = query.sizes();
  const at::Tensor log_sum_exp =
      at::empty({sizes[0], sizes[2], sizes[1]}, query.options().dtype(composite::accumulate_type(query)))
          .transpose(1, 2);
  return {heads_first({sizes[0], sizes[1], sizes[2], value.size(3)}, query.options()), log_sum_exp};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_attention_backward(
    const at::Tensor& /*grad*/, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& /*out*/, const at::Tensor& /*log_sum_exp*/, double /*dropout_p*/, bool /*is_causal*/,
    const std::optional<at::Tensor>& /*mask*/, std::optional<double> /*scale*/) {
  const auto like = [](const at::Tensor& tensor) { return heads_first(tensor.sizes(), tensor.options()); };
  return {like(query), like(key), like(value)};
}

at::Tensor scaled_mm(const at::Tensor& self, const at::Tensor& other, const at::Tensor& /*scale_a*/,
                     const at::Tensor& /*scale_b*/, const std::optional<at::Tensor>& /*bias*/,
                     const std::optional<at::Tensor>& /*scale_result*/,
                     std::optional<at::ScalarType> out_dtype, bool /*use_fast_accum*/) {
  TITAN_CHECK(self.size(1) == other.size(0), "_scaled_mm of ", self.sizes(), " and ", other.sizes());
  return at::empty({self.size(0), other.size(1)},
                   self.options().dtype(out_dtype.value_or(self.scalar_type())));
}

// Writes in place, and there is nothing to write.
void fused_adam(at::TensorList /*self*/, at::TensorList /*grads*/, at::TensorList /*exp_avgs*/,
                at::TensorList /*exp_avg_sqs*/, at::TensorList /*max_exp_avg_sqs*/,
                at::TensorList /*state_steps*/, double /*lr*/, double /*beta1*/, double /*beta2*/,
                double /*weight_decay*/, double /*eps*/, bool /*amsgrad*/, bool /*maximize*/,
                const std::optional<at::Tensor>& /*grad_scale*/,
                const std::optional<at::Tensor>& /*found_inf*/) {}

TORCH_LIBRARY_IMPL(aten, Meta, m) {
  m.impl("index_select", index_select);
  m.impl("embedding_dense_backward", embedding_dense_backward);
  m.impl("where.self", where);
  m.impl("_scaled_dot_product_flash_attention_for_cpu", flash_attention);
  m.impl("_scaled_dot_product_flash_attention_for_cpu_backward", flash_attention_backward);
  m.impl("_scaled_mm", scaled_mm);
  m.impl("_fused_adamw_", fused_adam);
  m.impl("_fused_adam_", fused_adam);
}

}  // namespace
}  // namespace titan::ops

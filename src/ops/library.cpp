// The operations that LibTorch's dispatcher knows us by (profiles show these names), their Meta kernels, and
// what runs where nothing better is registered. CPU kernels register themselves in src/ops/cpu, CUDA ones in
// the plugin. None is differentiable by itself: the functions of include/titan/ops are.

#include <torch/library.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "ops/attention_parts.h"
#include "ops/composite.h"

namespace titan::ops {

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
}  // namespace titan::ops

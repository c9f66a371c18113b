#include "ops/operators.h"

#include <limits>
#include <string>

#include <torch/library.h>

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/result_type.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include "ops/attention.h"
#include "titan/core/error.h"
#include "titan/ops/loss.h"

namespace titan::ops {

using at::Tensor;

// ---- composites

namespace composite {

namespace {

Tensor widened(const Tensor& tensor) { return tensor.to(accumulate_type(tensor)); }

// The column of each label among `size` columns from `first` on; 0 if another part has it.
struct Columns {
  Tensor index, foreign;  // [N]
  Columns(const Tensor& labels, int64_t first, int64_t size) : index(labels - first) {
    foreign = index.lt(0) | index.ge(size);
    index = index.masked_fill(foreign, 0);
  }
};

}  // namespace

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const Tensor wide = widened(x);
  const Tensor rstd = at::rsqrt(wide.square().mean(-1, /*keepdim=*/true) + eps);
  return {(wide * rstd * widened(weight)).to(x.scalar_type()), rstd.squeeze(-1)};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                             const Tensor& rstd) {
  const Tensor scale = rstd.unsqueeze(-1);
  const Tensor normed = widened(x) * scale, wide_grad = widened(grad);
  const Tensor grad_normed = wide_grad * widened(weight);
  const Tensor grad_x = scale * (grad_normed - normed * (grad_normed * normed).mean(-1, /*keepdim=*/true));
  return {grad_x.to(x.scalar_type()), (wide_grad * normed).reshape({-1, x.size(-1)}).sum(0)};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& added, const Tensor& weight,
                                                double eps) {
  static const auto op = find_operator<decltype(rms_norm)>("titan::rms_norm");
  const Tensor sum = x + added;
  auto [y, rstd] = op.call(sum, weight, eps);
  return {y, rstd, sum};
}

std::tuple<Tensor, Tensor> add_rms_norm_backward(const Tensor& grad, const Tensor& grad_sum,
                                                 const Tensor& sum, const Tensor& weight,
                                                 const Tensor& rstd) {
  static const auto op = find_operator<decltype(rms_norm_backward)>("titan::rms_norm_backward");
  auto [grad_x, grad_weight] = op.call(grad, sum, weight, rstd);
  return {grad_x.add_(grad_sum), grad_weight};
}

namespace {

Tensor rotated(const Tensor& x, const Tensor& table, const std::optional<Tensor>& positions, bool inverse) {
  const int64_t half = x.size(3) / 2;
  Tensor rows = positions ? at::embedding(table, *positions) : table.slice(0, 0, x.size(1));
  rows = rows.to(accumulate_type(x));
  if (rows.dim() == 2) rows = rows.unsqueeze(0);
  const Tensor cos_sin = rows.unflatten(-1, {half, 2}).unsqueeze(2);  // [1 or B, S, 1, D/2, 2]
  const Tensor cos = cos_sin.select(-1, 0);
  const Tensor sin = inverse ? cos_sin.select(-1, 1).neg() : cos_sin.select(-1, 1);
  const Tensor pairs = widened(x).unflatten(-1, {half, 2});
  const Tensor even = pairs.select(-1, 0), odd = pairs.select(-1, 1);
  return at::stack({even * cos - odd * sin, even * sin + odd * cos}, -1).flatten(-2).to(x.scalar_type());
}

}  // namespace

std::vector<Tensor> rotary(at::TensorList x, const Tensor& table, const std::optional<Tensor>& positions,
                           bool inverse) {
  std::vector<Tensor> results;
  for (const Tensor& each : x) results.push_back(rotated(each, table, positions, inverse));
  return results;
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  const Tensor wide = widened(gate);
  return (wide * at::sigmoid(wide) * widened(up)).to(gate.scalar_type());
}

std::tuple<Tensor, Tensor> swiglu_backward(const Tensor& grad, const Tensor& gate, const Tensor& up) {
  const Tensor wide_gate = widened(gate), wide_grad = widened(grad);
  const Tensor s = at::sigmoid(wide_gate);
  const Tensor grad_gate = wide_grad * widened(up) * s * (1 + wide_gate * (1 - s));
  return {grad_gate.to(gate.scalar_type()), (wide_grad * wide_gate * s).to(gate.scalar_type())};
}

std::tuple<Tensor, Tensor, Tensor> swiglu_with_backward(const Tensor& grad, const Tensor& gate,
                                                        const Tensor& up) {
  static const auto forward = find_operator<decltype(swiglu)>("titan::swiglu");
  static const auto backward = find_operator<decltype(swiglu_backward)>("titan::swiglu_backward");
  auto [grad_gate, grad_up] = backward.call(grad, gate, up);
  return {forward.call(gate, up), grad_gate, grad_up};
}

void merge_attention_(Tensor& out, Tensor& log_sum_exp, const Tensor& part, const Tensor& part_log_sum_exp) {
  const Tensor sums = part_log_sum_exp.to(log_sum_exp.scalar_type());
  // The part's share of the sum, which is 1 if there were no keys before (-inf).
  const Tensor weight = at::sigmoid(sums - log_sum_exp).transpose(1, 2).unsqueeze(-1);
  out.lerp_(part.to(out.scalar_type()), weight);
  at::logaddexp_out(log_sum_exp, log_sum_exp, sums);
}

Tensor sum_of_parts(at::TensorList parts) {
  TITAN_CHECK(!parts.empty(), "titan::sum_of_parts: no parts");
  const Tensor& first = parts.front();
  if (parts.size() == 1) return first.clone();
  Tensor sum = first.to(accumulate_type(first), /*non_blocking=*/false, /*copy=*/true);
  for (const Tensor& part : parts.slice(1)) sum.add_(part);
  return sum.to(first.scalar_type());
}

Tensor cross_entropy_(Tensor& logits, const Tensor& labels, bool with_grad) {
  const Tensor valid = labels.ne(kIgnoredLabel), column = labels.clamp_min(0).unsqueeze(1);
  const Tensor wide = widened(logits);
  const Tensor log_sum = at::logsumexp(wide, {1}, /*keepdim=*/true);
  const Tensor losses = (log_sum - wide.gather(1, column)).squeeze(1);
  const Tensor total = losses.to(at::kDouble).masked_fill(valid.logical_not(), 0).sum();
  if (with_grad) {
    const Tensor mask = valid.unsqueeze(1).to(wide.scalar_type());
    Tensor grad = (wide - log_sum).exp_().mul_(mask);
    logits.copy_(grad.scatter_add_(1, column, mask.neg()));
  }
  return total;
}

Tensor vocabulary_stats(const Tensor& logits, const Tensor& labels, int64_t first) {
  const Tensor wide = logits.to(at::kDouble);
  if (logits.size(1) == 0) {
    const Tensor nothing = at::zeros({2, logits.size(0)}, wide.options());
    nothing.select(0, 0).fill_(-std::numeric_limits<double>::infinity());
    return nothing;
  }
  const Columns columns(labels, first, logits.size(1));
  const Tensor target = wide.gather(1, columns.index.unsqueeze(1)).squeeze(1);
  return at::stack({at::logsumexp(wide, {1}), target.masked_fill(columns.foreign, 0)});
}

void vocabulary_grad_(Tensor& logits, const Tensor& labels, int64_t first, const Tensor& log_sum,
                      const std::optional<Tensor>& factors) {
  if (logits.size(1) == 0) return;
  const Columns columns(labels, first, logits.size(1));
  const Tensor grad = (logits.to(at::kDouble) - log_sum.unsqueeze(1)).exp_();
  Tensor at_target = columns.foreign.to(at::kDouble).sub_(1);
  if (factors) {
    grad.mul_(factors->select(0, 0).unsqueeze(1)).add_(factors->select(0, 2).unsqueeze(1));
    at_target = factors->select(0, 1).masked_fill(columns.foreign, 0);
  }
  grad.scatter_add_(1, columns.index.unsqueeze(1), at_target.unsqueeze(1));
  logits.copy_(grad.masked_fill_(labels.eq(kIgnoredLabel).unsqueeze(1), 0));
}

// On a GPU, index_add_ would add with atomics, so that two runs differ. LibTorch's own backward sorts equal
// tokens together and adds their rows in a fixed order. For up to 3,072 tokens it has another kernel, which
// adds in a fixed order, too; but if these are more than one batch of 1,024, a warp may load the next batch
// while another still reads the last one (pytorch/pytorch#187687). Rows of zeros keep such numbers away from it.
Tensor embedding_backward(const Tensor& grad, const Tensor& tokens, int64_t num_embeddings) {
  constexpr int64_t one_batch = 1024, most_unsorted = 3072;
  Tensor rows = widened(grad).reshape({-1, grad.size(-1)}), indices = tokens.reshape({-1});
  if (indices.numel() > one_batch && indices.numel() <= most_unsorted) {
    const int64_t more = most_unsorted + 1 - indices.numel();
    rows = at::constant_pad_nd(rows, {0, 0, 0, more});
    indices = at::constant_pad_nd(indices, {0, more});
  }
  return at::embedding_dense_backward(rows, indices, num_embeddings, /*padding_idx=*/-1,
                                      /*scale_grad_by_freq=*/false);
}

}  // namespace composite

namespace {

// ---- the operators
// LibTorch's dispatcher, and so its profiles, know our operations by these names. CPU kernels register
// themselves in src/ops/cpu, CUDA kernels in the plugin. None of these is differentiable; the functions of
// include/titan/ops are.

TORCH_LIBRARY(titan, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor y, Tensor rstd)");
  m.def(
      "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor rstd) -> (Tensor grad_x, Tensor "
      "grad_weight)");
  // The norm of sum = x + added. The backward adds grad_sum, what the sum's other users have for it. These have kernels
  // on GPUs only; on CPUs they are LibTorch's additions around rms_norm.
  m.def(
      "add_rms_norm(Tensor x, Tensor added, Tensor weight, float eps) -> (Tensor y, Tensor rstd, Tensor "
      "sum)");
  m.def(
      "add_rms_norm_backward(Tensor grad, Tensor grad_sum, Tensor sum, Tensor weight, Tensor rstd) -> "
      "(Tensor "
      "grad_x, Tensor grad_weight)");
  // Tensors of the same tokens.
  m.def("rotary(Tensor[] x, Tensor table, Tensor? positions, bool inverse) -> Tensor[]");
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  m.def("swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor grad_gate, Tensor grad_up)");
  // swiglu's output again, and its backward, in one pass.
  m.def(
      "swiglu_with_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor out, Tensor grad_gate, Tensor "
      "grad_up)");
  // Causal, and with `starts` within the documents that start there (ops::Documents), of at most `longest` tokens.
  m.def(
      "causal_attention(Tensor q, Tensor k, Tensor v, Tensor? starts=None, int longest=0) "
      "-> (Tensor out, Tensor log_sum_exp)");
  m.def(
      "causal_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor log_sum_exp, "
      "Tensor? starts=None, int longest=0) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)");
  // Attention over part of the keys, added to `out` and `log_sum_exp` over other keys; query i sees the keys
  // 0 .. first_query + i. The backward adds to the gradients; its `out` and `log_sum_exp` are over all keys.
  m.def(
      "attend_(Tensor(a!) out, Tensor(b!) log_sum_exp, Tensor q, Tensor k, Tensor v, int first_query) -> ()");
  m.def(
      "attend_backward_(Tensor(a!) grad_q, Tensor(b!) grad_k, Tensor(c!) grad_v, Tensor grad, Tensor q, "
      "Tensor k, Tensor v, Tensor out, Tensor log_sum_exp, int first_query) -> ()");
  // Adds attention over other keys, `part`, to `out`, as one softmax over the keys of both. Both are [B, S, H, D], and the sums
  // [B, H, S]; -inf: no keys.
  m.def(
      "merge_attention_(Tensor(a!) out, Tensor(b!) log_sum_exp, Tensor part, Tensor part_log_sum_exp) -> ()");
  // The sum of tensors of one size and dtype, added in their order in fp32 (float64 in float64) and rounded once.
  m.def("sum_of_parts(Tensor[] parts) -> Tensor");
  // Sum of the token losses (double). With with_grad, the logits are replaced by their gradient.
  m.def("cross_entropy_(Tensor(a!) logits, Tensor labels, bool with_grad) -> Tensor");
  // For logits [N, rows of a part]: each token's log-sum-exp and target logit (0 if another part has the
  // target), double [2, N].
  m.def("vocabulary_stats(Tensor logits, Tensor labels, int first) -> Tensor");
  // Replaces logits by their gradient, zeros at ignored labels. log_sum: double [N], over all parts. factors:
  // double [3, N], on softmax, on the label's one-hot and on the constant 1; default: 1, -1, 0.
  m.def(
      "vocabulary_grad_(Tensor(a!) logits, Tensor labels, int first, Tensor log_sum, Tensor? factors=None) "
      "-> "
      "()");
  m.def("embedding_backward(Tensor grad, Tensor tokens, int num_embeddings) -> Tensor");
  // [Note: the arithmetic of titan::adam_]. fp32 or bf16, contiguous; a gradient has its parameter's dtype. places: key, first, row and
  // pitch of each parameter's adam::Place. steps: fp32 scalars that count this update. The gradients are multiplied by grad_factor
  // (double) and not written. If skip (fp32) is 1, nothing changes. lr_on_device (fp32) takes the place of lr.
  m.def(
      "adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor[] "
      "steps, int[] places, float lr, float beta1, float beta2, float weight_decay, float eps, bool "
      "decoupled, bool stochastic, Tensor? grad_factor=None, Tensor? skip=None, Tensor? lr_on_device=None) "
      "-> ()");
}

TORCH_LIBRARY_IMPL(titan, CompositeExplicitAutograd, m) {
  m.impl("rms_norm", composite::rms_norm);
  m.impl("rms_norm_backward", composite::rms_norm_backward);
  m.impl("add_rms_norm", composite::add_rms_norm);
  m.impl("add_rms_norm_backward", composite::add_rms_norm_backward);
  m.impl("rotary", composite::rotary);
  m.impl("swiglu", composite::swiglu);
  m.impl("swiglu_backward", composite::swiglu_backward);
  m.impl("swiglu_with_backward", composite::swiglu_with_backward);
  m.impl("causal_attention", causal_attention_by_libtorch);
  m.impl("causal_attention_backward", causal_attention_backward_by_libtorch);
  m.impl("attend_", attend_by_libtorch);
  m.impl("attend_backward_", attend_backward_by_libtorch);
  m.impl("merge_attention_", composite::merge_attention_);
  m.impl("sum_of_parts", composite::sum_of_parts);
  m.impl("cross_entropy_", composite::cross_entropy_);
  m.impl("vocabulary_stats", composite::vocabulary_stats);
  m.impl("vocabulary_grad_", composite::vocabulary_grad_);
  m.impl("embedding_backward", composite::embedding_backward);
  m.impl("adam_", composite::adam_);
}

// ---- meta kernels: sizes without data

using In = const Tensor&;
using Pair = std::tuple<Tensor, Tensor>;
using Triple = std::tuple<Tensor, Tensor, Tensor>;

Tensor wide_empty(at::IntArrayRef sizes, In like) {
  return at::empty(sizes, like.options().dtype(composite::accumulate_type(like)));
}
Tensor double_empty(at::IntArrayRef sizes, In like) {
  return at::empty(sizes, like.options().dtype(at::kDouble));
}
Tensor contiguous_like(In x) { return at::empty(x.sizes(), x.options()); }

TORCH_LIBRARY_IMPL(titan, Meta, m) {
  m.impl("rms_norm", [](In x, In, double) -> Pair {
    return {at::empty_like(x), wide_empty(x.sizes().slice(0, static_cast<size_t>(x.dim() - 1)), x)};
  });
  m.impl("rms_norm_backward", [](In, In x, In weight, In) -> Pair {
    return {at::empty_like(x), wide_empty(weight.sizes(), x)};
  });
  m.impl("rotary", [](at::TensorList x, In, const std::optional<Tensor>&, bool) {
    std::vector<Tensor> results;
    for (In each : x) results.push_back(at::empty_like(each));
    return results;
  });
  m.impl("swiglu", [](In gate, In) { return at::empty_like(gate); });
  m.impl("swiglu_backward", [](In, In gate, In up) -> Pair {
    return {at::empty_like(gate), at::empty_like(up)};
  });
  m.impl("causal_attention", [](In q, In, In, const std::optional<Tensor>&, int64_t) -> Pair {
    return {contiguous_like(q), wide_empty({q.size(0), q.size(2), q.size(1)}, q)};
  });
  m.impl("causal_attention_backward",
         [](In, In q, In k, In v, In, In, const std::optional<Tensor>&, int64_t) -> Triple {
           return {contiguous_like(q), contiguous_like(k), contiguous_like(v)};
         });
  m.impl("attend_", [](Tensor&, Tensor&, In, In, In, int64_t) {});
  m.impl("attend_backward_", [](Tensor&, Tensor&, Tensor&, In, In, In, In, In, In, int64_t) {});
  m.impl("merge_attention_", [](Tensor&, Tensor&, In, In) {});
  m.impl("sum_of_parts", [](at::TensorList parts) { return contiguous_like(parts.front()); });
  m.impl("cross_entropy_", [](Tensor& logits, In, bool) { return double_empty({}, logits); });
  m.impl("vocabulary_stats", [](In logits, In, int64_t) {
    return double_empty({2, logits.size(0)}, logits);
  });
  m.impl("vocabulary_grad_", [](Tensor&, In, int64_t, In, const std::optional<Tensor>&) {});
  m.impl("embedding_backward", [](In grad, In, int64_t num_embeddings) {
    return wide_empty({num_embeddings, grad.size(-1)}, grad);
  });
  using List = at::TensorList;
  using Maybe = const std::optional<Tensor>&;
  m.impl("adam_", [](List, List, List, List, List, at::IntArrayRef, double, double, double, double, double,
                     bool, bool, Maybe, Maybe, Maybe) {});
}

// ---- LibTorch's missing meta kernels
// PyTorch implements these in Python. Without them, a dry run of a model would stop at its embedding. Memory
// layouts are those of the CPU kernels.

// Heads before the sequence in the sizes, after it in memory.
Tensor heads_first(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::empty({sizes[0], sizes[2], sizes[1], sizes[3]}, options).transpose(1, 2);
}

// Writes only in place, so on the meta device it does nothing.
void fused_adam(at::TensorList /*self*/, at::TensorList /*grads*/, at::TensorList /*exp_avgs*/,
                at::TensorList /*exp_avg_sqs*/, at::TensorList /*max_exp_avg_sqs*/,
                at::TensorList /*state_steps*/, double /*lr*/, double /*beta1*/, double /*beta2*/,
                double /*weight_decay*/, double /*eps*/, bool /*amsgrad*/, bool /*maximize*/,
                const std::optional<Tensor>& /*grad_scale*/, const std::optional<Tensor>& /*found_inf*/) {}

TORCH_LIBRARY_IMPL(aten, Meta, m) {
  using Mask = const std::optional<Tensor>&;
  using Scale = std::optional<double>;
  m.impl("index_select", [](In self, int64_t dim, In index) {
    std::vector<int64_t> sizes = self.sizes().vec();
    if (!sizes.empty()) sizes[static_cast<size_t>(at::maybe_wrap_dim(dim, self.dim()))] = index.numel();
    return at::empty(sizes, self.options());
  });
  m.impl("embedding_dense_backward", [](In grad, In, int64_t num_weights, int64_t, bool) {
    return at::empty({num_weights, grad.size(-1)}, grad.options());
  });
  m.impl("where.self", [](In condition, In self, In other) {
    const auto sizes = at::infer_size(condition.sizes(), at::infer_size(self.sizes(), other.sizes()));
    return at::empty(sizes, self.options().dtype(at::result_type(self, other)));
  });
  m.impl("_scaled_dot_product_flash_attention_for_cpu",
         [](In query, In, In value, double, bool, Mask, Scale) -> Pair {
           const auto sizes = query.sizes();
           return {heads_first({sizes[0], sizes[1], sizes[2], value.size(3)}, query.options()),
                   wide_empty({sizes[0], sizes[2], sizes[1]}, query).transpose(1, 2)};
         });
  m.impl("_scaled_dot_product_flash_attention_for_cpu_backward",
         [](In, In query, In key, In value, In, In, double, bool, Mask, Scale) -> Triple {
           const auto like = [](In tensor) { return heads_first(tensor.sizes(), tensor.options()); };
           return {like(query), like(key), like(value)};
         });
  m.impl("_scaled_mm", [](In self, In other, In, In, const std::optional<Tensor>&,
                          const std::optional<Tensor>&, std::optional<at::ScalarType> out_dtype, bool) {
    TITAN_CHECK(self.size(1) == other.size(0), "_scaled_mm of ", self.sizes(), " and ", other.sizes());
    return at::empty({self.size(0), other.size(1)},
                     self.options().dtype(out_dtype.value_or(self.scalar_type())));
  });
  m.impl("_fused_adamw_", fused_adam);
  m.impl("_fused_adam_", fused_adam);
}

}  // namespace
}  // namespace titan::ops
